// Markdown as HTML text. No HTML of an answer is kept, no image is loaded, and links lead to http, https and mailto.

import MarkdownIt from "markdown-it";
import footnote from "markdown-it-footnote";
import { math } from "./math";

export const md = new MarkdownIt({ html: false, linkify: true, breaks: false });
md.use(footnote).use(math);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
md.validateLink = (address) => ADDRESS.test(address.trim());

// the page has headings of its own
for (const kind of ["heading_open", "heading_close"] as const) {
  md.renderer.rules[kind] = (tokens, index, options, _env, self) => {
    const token = tokens[index]!;
    token.tag = `h${Math.min(6, Number(token.tag.slice(1)) + 2)}`;
    return self.renderToken(tokens, index, options);
  };
}

md.renderer.rules["image"] = (tokens, index) => {
  const address = String(tokens[index]!.attrGet("src") ?? "");
  const name = md.utils.escapeHtml(tokens[index]!.content || address);
  return `<a href="${md.utils.escapeHtml(address)}">${name}</a>`;
};

md.renderer.rules["fence"] = (tokens, index) => {
  const { info, content } = tokens[index]!;
  const language = /^[\w+#.-]+/.exec(info.trim())?.[0] ?? "";
  return `<pre${language ? ` data-language="${language}"` : ""}><code>${md.utils.escapeHtml(content)}</code></pre>\n`;
};
md.renderer.rules["code_block"] = md.renderer.rules["fence"];
md.renderer.rules["table_open"] = () => '<div class="table"><table>\n';
md.renderer.rules["table_close"] = () => "</table></div>\n";

// where a cell's text stands is said by a class: styles in a text are what the policy forbids
for (const kind of ["th_open", "td_open"] as const) {
  md.renderer.rules[kind] = (tokens, index, options, _env, self) => {
    const token = tokens[index]!;
    const side = /text-align:(\w+)/.exec(String(token.attrGet("style") ?? ""))?.[1];
    if (side) token.attrs = [["class", `to-${side}`]];
    return self.renderToken(tokens, index, options);
  };
}

// notes: numbers that lead to each other by a click, without addresses
const noteNumber = (meta: { id: number } | null) => String((meta?.id ?? 0) + 1);
md.renderer.rules["footnote_ref"] = (tokens, index) => {
  const number = noteNumber(tokens[index]!.meta as { id: number });
  return `<sup class="note-ref" data-note="${number}">${number}</sup>`;
};
md.renderer.rules["footnote_block_open"] = () => '<section class="notes"><ol>\n';
md.renderer.rules["footnote_block_close"] = () => "</ol></section>\n";
md.renderer.rules["footnote_open"] = (tokens, index) => `<li data-note="${noteNumber(tokens[index]!.meta as { id: number })}">`;
md.renderer.rules["footnote_close"] = () => "</li>\n";
md.renderer.rules["footnote_anchor"] = () => "";

// task lists: [ ] and [x] at the beginning of an item
md.core.ruler.after("inline", "tasks", (state) => {
  state.tokens.forEach((token, at, tokens) => {
    const item = tokens[at - 2];
    if (token.type !== "inline" || item?.type !== "list_item_open" || tokens[at - 1]?.type !== "paragraph_open") return;
    const first = token.children?.[0];
    const found = first?.type === "text" ? /^\[([ xX])\]\s+/.exec(first.content) : null;
    if (!first || !found) return;
    first.content = first.content.slice(found[0].length);
    item.attrJoin("class", "task");
    const box = new state.Token("task", "input", 0);
    box.meta = { done: found[1] !== " " };
    token.children!.unshift(box);
  });
});
md.renderer.rules["task"] = (tokens, index) =>
  tokens[index]!.meta?.["done"] ? '<input type="checkbox" aria-label="done" checked disabled> ' : '<input type="checkbox" aria-label="to do" disabled> ';
