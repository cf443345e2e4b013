// A text that grows, as blocks: what is finished is parsed once, only the unfinished end is parsed again.

import { md } from "./markdown";

export interface Block {
  /** Where it begins; with its text it tells whether it is the same as before. */
  start: number;
  text: string;
  html: string;
}

// What says something about other places of the text: then only the whole is right.
const REFERENCES = /^ {0,3}\[[^\]\n]+\]:/m;
// A text of at most so many characters is one block if nobody has seen it grow: each block is cleaned by itself, which
// costs more than what is in it.
const WHOLE = 4_000;

export class Blocks {
  #text = "";
  #done: Block[] = [];
  #rest = 0;
  #grew = false;

  /** The blocks of a text. `over`: nothing will be added to it. */
  of(text: string, over: boolean): Block[] {
    if (!text.startsWith(this.#text)) {
      this.#done = [];
      this.#rest = 0;
    }
    this.#text = text;
    this.#grew ||= !over;
    if (over && (REFERENCES.test(text) || (!this.#grew && text.length <= WHOLE))) return text.trim() ? [{ start: 0, text, html: md.render(text) }] : [];
    const fresh = split(text, this.#rest);
    if (!over) {
      // a line that is still being written may yet belong to the block before it
      const lastLine = text.lastIndexOf("\n") + 1;
      const open = fresh.findLastIndex((block) => block.start < lastLine);
      this.#done.push(...fresh.splice(0, Math.max(0, open)));
      this.#rest = fresh[0]?.start ?? this.#rest;
    }
    return [...this.#done, ...fresh];
  }
}

// Some screens of text: fewer are more places to watch, more are laid out together.
const GROUP = 20;

/** Blocks in groups; those of a text that grows stay in theirs. */
export function grouped(blocks: readonly Block[]): Block[][] {
  return Array.from({ length: Math.ceil(blocks.length / GROUP) }, (_, at) => blocks.slice(at * GROUP, (at + 1) * GROUP));
}

/** The blocks of the outermost level from a place on. */
function split(text: string, from: number): Block[] {
  const source = text.slice(from);
  const env = {};
  const tokens = md.parse(source, env);
  const starts = [0];
  for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) starts.push(at + 1);
  const found: Block[] = [];
  let first = 0;
  tokens.forEach((token, at) => {
    if (token.level !== 0 || token.nesting === 1) return;
    const map = tokens[first]!.map;
    const group = tokens.slice(first, at + 1);
    const html = md.renderer.render(group, md.options, env);
    first = at + 1;
    const before = found.at(-1);
    if (!map) {
      // what has no place of its own (notes) stands behind the last
      if (before) before.html += html;
      return;
    }
    const start = from + starts[map[0]]!;
    found.push({ start, text: text.slice(start, from + (starts[map[1]] ?? source.length)), html });
  });
  return found;
}
