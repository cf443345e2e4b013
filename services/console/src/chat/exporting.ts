// A conversation as a file.

import type { Session, TurnShown } from "../api/types";
import { saveBytes } from "../files";

export function asMarkdown(title: string, turns: readonly TurnShown[]): string {
  const said = turns.map((turn) => `## ${new Date(turn.time).toISOString().slice(0, 16).replace("T", " ")}\n\n${quoted(asked(turn))}\n\n${turn.answer}\n`);
  return `# ${title.replace(/\s+/g, " ")}\n\n${said.join("\n")}`;
}

const asked = ({ query, attachments }: TurnShown) => [query, ...attachments.map(({ name }) => `[attached: ${name || "a file"}]`)].filter(Boolean).join("\n");
const quoted = (text: string) => text.split("\n").map((line) => `> ${line}`).join("\n");

export function asJson(session: Session, turns: readonly TurnShown[]): string {
  const { session_id, title, created, updated } = session;
  return `${JSON.stringify({ session_id, title, created, updated, turns }, null, 2)}\n`;
}

/** Give the user a text as a file. */
export const save = (name: string, text: string, type: string): void => saveBytes(name, new Blob([text], { type }));

/** The title as the name of a file. */
export const fileName = (title: string): string => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
