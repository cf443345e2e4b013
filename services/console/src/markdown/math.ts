// Formulas: \( \), \[ \], $ $ and $$ $$. Their text is kept as it was written, for KaTeX to read.

import type { MarkdownIt } from "markdown-it";

const INLINE: readonly [open: string, close: string, display: boolean][] = [
  ["\\(", "\\)", false],
  ["\\[", "\\]", true],
  ["$$", "$$", true],
];

/** The end of a formula between single dollars that begins at `at`; -1 where it is none, as in "$5 and $6". */
function dollars(text: string, at: number): number {
  if (/\s/.test(text[at + 1] ?? " ") || text[at + 1] === "$") return -1;
  for (let end = at + 1; end < text.length; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "\n" && text[end + 1] === "\n") return -1;
    else if (text[end] === "$") return /\s/.test(text[end - 1]!) || /\d/.test(text[end + 1] ?? "") ? -1 : end;
  }
  return -1;
}

// Marks whose end a text does not have: it is looked for once, not from each beginning.
const missing = new WeakMap<object, Set<string>>();

export function math(md: MarkdownIt): void {
  md.inline.ruler.before("escape", "math", (state, silent) => {
    const { src, pos } = state;
    const take = (open: number, end: number, close: number, display: boolean) => {
      if (!silent) {
        const token = state.push("math", "math", 0);
        token.content = src.slice(pos + open, end).trim();
        token.meta = { display };
      }
      state.pos = end + close;
      return true;
    };
    for (const [open, close, display] of INLINE) {
      if (!src.startsWith(open, pos) || missing.get(state)?.has(close)) continue;
      const end = src.indexOf(close, pos + open.length);
      if (end < 0) missing.set(state, (missing.get(state) ?? new Set()).add(close));
      if (end > pos + open.length && end < state.posMax) return take(open.length, end, close.length, display);
    }
    if (src[pos] !== "$" || !src.includes("$", pos + 1)) return false;
    const end = dollars(src, pos);
    return end > 0 && end < state.posMax ? take(1, end, 1, false) : false;
  });

  md.block.ruler.before("fence", "math", (state, start, last, silent) => {
    const line = (number: number) => state.src.slice(state.bMarks[number]! + state.tShift[number]!, state.eMarks[number]).trimEnd();
    const first = line(start);
    const open = ["$$", "\\["].find((mark) => first.startsWith(mark));
    if (!open || state.sCount[start]! - state.blkIndent >= 4) return false;
    const close = open === "$$" ? "$$" : "\\]";
    let end = start;
    let text = first.slice(2);
    while (!text.endsWith(close)) {
      end += 1;
      // without its end it is a paragraph, where text around it may close it
      if (end >= last || !line(end).trim()) return false;
      text += `\n${line(end)}`;
    }
    if (silent) return true;
    const token = state.push("math", "math", 0);
    token.block = true;
    token.content = text.slice(0, -2).trim();
    token.meta = { display: true };
    token.map = [start, end + 1];
    state.line = end + 1;
    return true;
  }, { alt: ["paragraph", "reference", "blockquote", "list"] });

  md.renderer.rules["math"] = (tokens, index) => {
    const { content, meta } = tokens[index]!;
    const tag = tokens[index]!.block ? "div" : "span";
    return `<${tag} class="math${meta?.["display"] ? " display" : ""}" dir="ltr">${md.utils.escapeHtml(content)}</${tag}>`;
  };
}
