// Markdown as a tree of plain objects, and the tree as elements. Text only ever becomes text nodes: no HTML of an
// answer is interpreted, no image is loaded, and links lead to http, https and mailto addresses only.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const DEEPEST = 8;

const el = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** The blocks of a text: nodes {tag, attrs, children}; children are nodes and strings. */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) { at += 1; continue; }
    const [node, next] = fenced(lines, at) ?? heading(lines, at) ?? rule(lines, at)
      ?? (depth < DEEPEST ? quote(lines, at, depth) ?? list(lines, at, depth) : null)
      ?? table(lines, at) ?? paragraph(lines, at);
    found.push(node);
    at = next;
  }
  return found;
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const attrs = open[2] ? { "data-language": open[2] } : {};
  return [el("pre", [el("code", [lines.slice(at + 1, end).join("\n")])], attrs), end + 1];
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  // the page itself has h1 and h2
  return found && [el(`h${Math.min(6, found[1].length + 2)}`, inline(found[2])), at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [el("hr", []), at + 1] : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  return [el("blockquote", blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const found = ITEM.exec(lines[end]);
    const deeper = /^ */.exec(lines[end])[0].length > indent;
    if (RULE.test(lines[end])) break;
    if (found && found[1].length <= indent) {
      if (found[1].length < indent || /\d/.test(found[2]) !== ordered) break;
      items.push([found[3]]);
    } else if (lines[end].trim() && (deeper || (lines[end - 1].trim() && !starts(lines, end)))) {
      items.at(-1).push(deeper ? lines[end].slice(indent + 2) : lines[end]);
    } else if (!lines[end].trim() && continues(lines, end, indent, ordered)) {
      items.at(-1).push("");
    } else {
      break;
    }
  }
  const start = ordered ? { start: String(parseInt(first[2], 10)) } : {};
  const nodes = items.map((item) => el("li", tight(blocks(item, depth + 1))));
  return [el(ordered ? "ol" : "ul", nodes, start), end];
}

/** Whether the list goes on after the empty lines that begin here. */
function continues(lines, at, indent, ordered) {
  let following = at;
  while (following < lines.length && !lines[following].trim()) following += 1;
  const next = lines[following];
  if (next === undefined) return false;
  const item = ITEM.exec(next);
  if (item && item[1].length === indent) return /\d/.test(item[2]) === ordered;
  return /^ */.exec(next)[0].length > indent;
}

/** A single paragraph stands in its item without being one. */
function tight(nodes) {
  return nodes[0]?.tag === "p" ? [...nodes[0].children, ...nodes.slice(1)] : nodes;
}

function table(lines, at) {
  if (!lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1] ?? "")) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => el("tr", cells(line).map((cell) => el(tag, inline(cell))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  return [el("table", [el("thead", [row(lines[at], "th")]), el("tbody", body)]), end];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

const starts = (lines, at) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at])
  || QUOTE.test(lines[at]) || ITEM.test(lines[at]);

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines, end)) end += 1;
  return [el("p", inline(lines.slice(at, end).map((line) => line.trim()).join("\n"))), end];
}

// Alternatives in order: escape · code · link · bare address · bold and italic · bold · italic · struck through.
const INLINE = new RegExp([
  String.raw`\\([!-/:-@[-\x60{-~])`,
  String.raw`(\x60+)(?!\x60)([^]+?)(?<!\x60)\2(?!\x60)`,
  String.raw`!?\[([^\][]{0,1000})\]\(\s*([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)(?:\s+"[^"]*")?\s*\)`,
  String.raw`<?(https?://[^\s<>"'\x60]+)>?`,
  String.raw`\*\*\*(?=[^\s*])([^*]+)(?<=\S)\*\*\*`,
  String.raw`(\*\*|__)(?=\S)((?:(?!\8)[^])+?)(?<=\S)\8`,
  String.raw`(?<![\w*])([*_])(?=[^\s*_])((?:(?!\10)[^])+?)(?<=\S)\10(?!\w)`,
  String.raw`~~(?=\S)((?:(?!~~)[^])+?)~~`,
].join("|"), "g");

/** The nodes of one line of text. */
export function inline(text, depth = 0) {
  const found = [];
  const inner = (part) => (depth < DEEPEST ? inline(part, depth + 1) : [part]);
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) found.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    const [whole, escaped, , code, label, target, address, both, , bold, , italic, struck] = match;
    if (escaped !== undefined) found.push(escaped);
    else if (code !== undefined) found.push(el("code", [code.replace(/\n/g, " ")]));
    else if (label !== undefined) found.push(...link(target, label ? inner(label) : [target], whole));
    else if (address !== undefined) found.push(...bare(whole, address));
    else if (both !== undefined) found.push(el("strong", [el("em", inner(both))]));
    else if (bold !== undefined) found.push(el("strong", inner(bold)));
    else if (italic !== undefined) found.push(el("em", inner(italic)));
    else found.push(el("del", inner(struck)));
  }
  if (at < text.length) found.push(text.slice(at));
  return found;
}

function link(target, children, whole) {
  const href = safeAddress(target);
  return href ? [el("a", children, { href, target: "_blank", rel: "noopener noreferrer" })] : [whole];
}

function bare(whole, address) {
  if (whole.startsWith("<")) return link(address, [address], whole);
  // the full stop after an address, or the bracket round it, is not part of it
  const trimmed = address.replace(/(?:[.,;:!?*_~]|\)(?<!\([^()]*\)))+$/, "");
  return [...link(trimmed, [trimmed], trimmed), ...(whole === trimmed ? [] : [whole.slice(trimmed.length)])];
}

/** The address if it is one that a click may open, else null. */
export function safeAddress(target) {
  try {
    const url = new URL(target);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const build = (node) => {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attrs)) element.setAttribute(name, value);
  element.append(...node.children.map(build));
  return element;
};

/** Shows a text in an element. Blocks that stay the same are left alone: a selection in them survives streaming. */
export function show(element, text) {
  const known = element.shownBlocks ?? [];
  const fresh = parse(text).map((node) => ({ node, key: JSON.stringify(node) }));
  let same = 0;
  while (same < known.length && same < fresh.length && known[same] === fresh[same].key) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...fresh.slice(same).map(({ node }) => build(node)));
  element.shownBlocks = fresh.map(({ key }) => key);
}
