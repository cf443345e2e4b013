// A conversation as a file.

import type { Session, TurnShown } from "../api/types";
import { addressOf, releaseAddress } from "../storage";

export function asMarkdown(title: string, turns: readonly TurnShown[]): string {
  const said = turns.map((turn) => `## ${new Date(turn.time).toISOString().slice(0, 16).replace("T", " ")}\n\n${quoted(turn.query)}\n\n${turn.answer}\n`);
  return `# ${title.replace(/\s+/g, " ")}\n\n${said.join("\n")}`;
}

const quoted = (text: string) => text.split("\n").map((line) => `> ${line}`).join("\n");

export function asJson(session: Session, turns: readonly TurnShown[]): string {
  const { session_id, title, created, updated } = session;
  return `${JSON.stringify({ session_id, title, created, updated, turns }, null, 2)}\n`;
}

/** Gives the user a file. */
export function save(name: string, text: string, type: string): void {
  const address = addressOf(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => releaseAddress(address), 10_000);
}

/** The title as the name of a file. */
export const fileName = (title: string): string => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
