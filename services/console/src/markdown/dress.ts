// What the nodes of an answer get beside their text: colours, copying, formulas, the direction of the script.

import { clean } from "../trusted";

const TEXTS = "p, li, h3, h4, h5, h6, blockquote, td, th";
// Beyond this, colours cost more than they tell.
const MOST_COLOURED = 60_000;
// Colours do not move anything: they come when the page has nothing better to do, at the latest after so many ms.
const COLOURED_WITHIN = 1_000;
const uncoloured = new Set<HTMLElement>();

const make = <K extends keyof HTMLElementTagNameMap>(tag: K, className: string, ...children: (Node | string)[]) => {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
};

/** Dresses nodes that are shown. `over`: their text is finished, so that it is worth its colours. */
export function dress(parent: ParentNode, over: boolean): void {
  for (const element of parent.querySelectorAll<HTMLElement>(TEXTS)) element.dir = "auto";
  for (const pre of parent.querySelectorAll("pre")) frame(pre, over);
  for (const place of parent.querySelectorAll<HTMLElement>(".table")) {
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", "Table");
  }
  for (const mark of parent.querySelectorAll<HTMLElement>(".note-ref")) note(mark);
  const formulas = [...parent.querySelectorAll<HTMLElement>(".math")];
  if (formulas.length) void import("./katex").then(({ formula }) => formulas.forEach((one) => show(one, formula)));
}

function show(element: HTMLElement, formula: (tex: string, display: boolean) => DocumentFragment | null): void {
  const tex = element.textContent ?? "";
  if (element.dataset["tex"] !== undefined) return;
  const nodes = formula(tex, element.classList.contains("display"));
  if (!nodes) return;
  element.dataset["tex"] = tex;
  element.replaceChildren(nodes);
}

/** A head with the language, copying and wrapping over a piece of code. */
function frame(pre: HTMLPreElement, over: boolean): void {
  const code = pre.querySelector("code");
  if (!code) return;
  const language = pre.dataset["language"] ?? "";
  pre.tabIndex = 0;
  pre.dir = "ltr";
  pre.setAttribute("aria-label", language ? `Code: ${language}` : "Code");
  if (!pre.parentElement?.classList.contains("code")) {
    const copy = make("button", "quiet", "Copy");
    const wrap = make("button", "quiet", "Wrap");
    copy.type = wrap.type = "button";
    copy.addEventListener("click", () => void copied(code.textContent ?? "", copy));
    wrap.setAttribute("aria-pressed", "false");
    wrap.addEventListener("click", () => wrap.setAttribute("aria-pressed", String(pre.classList.toggle("wrap"))));
    const box = make("div", "code", make("div", "code-head", make("span", "language", language), wrap, copy));
    pre.replaceWith(box);
    box.append(pre);
  }
  if (!over || !language || (code.textContent ?? "").length > MOST_COLOURED) return;
  if (!uncoloured.size) whenIdle();
  uncoloured.add(code);
}

/** Colours what waits for it, as much as there is time for, and goes on when there is time again. */
function whenIdle(): void {
  void import("./highlight").then(({ coloured }) => {
    const go = (time?: IdleDeadline) => {
      for (const code of uncoloured) {
        uncoloured.delete(code);
        const language = code.closest("pre")?.dataset["language"];
        // it may have left the page by now
        const html = language && code.isConnected ? coloured(code.textContent ?? "", language) : null;
        if (html !== null) code.replaceChildren(clean(html));
        if (time && time.timeRemaining() <= 0) break;
      }
      if (uncoloured.size) requestIdleCallback(go, { timeout: COLOURED_WITHIN });
    };
    // not every browser says when it is idle
    if (typeof requestIdleCallback === "function") requestIdleCallback(go, { timeout: COLOURED_WITHIN });
    else setTimeout(go);
    // without colours it can be read as well
  }).catch(() => uncoloured.clear());
}

/** Puts a text on the clipboard and says so on the button for a moment. */
export async function copied(text: string, button: HTMLElement): Promise<void> {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // without a secure connection there is no clipboard for pages
    button.textContent = "Not allowed by the browser";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function note(mark: HTMLElement): void {
  const number = mark.dataset["note"] ?? "";
  const button = make("button", "note-button", number);
  button.type = "button";
  button.setAttribute("aria-label", `Note ${number}`);
  button.addEventListener("click", () => {
    const target = mark.closest(".prose")?.querySelector<HTMLElement>(`li[data-note="${CSS.escape(number)}"]`);
    target?.scrollIntoView({ block: "nearest" });
    target?.classList.add("found");
  });
  mark.replaceChildren(button);
}
