// @vitest-environment jsdom
import { describe, expect, it } from "vitest";
import { clean } from "../trusted";
import { Blocks, grouped } from "./blocks";
import { md } from "./markdown";

function shown(text: string): HTMLElement {
  const element = document.createElement("div");
  element.append(clean(md.render(text)));
  return element;
}

const KINDS = new Set(["P", "PRE", "CODE", "H3", "HR", "BLOCKQUOTE", "UL", "OL", "LI", "A", "STRONG", "EM", "S", "DIV", "SPAN", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "INPUT", "SUP", "SECTION"]);

describe("what an answer becomes", () => {
  it("is elements of a few kinds, and links to safe addresses only", () => {
    const hostile = [
      "<img src=x onerror=alert(1)> <script>alert(1)</script> <style>*{}</style> <svg onload=alert(1)>",
      "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) [e](/admin) [f](//evil)",
      "[g](https://ok.example/a_(b)) ![h](http://ok.example/p.png) <https://ok.example/x>",
      "[i](mailto:a@b.example) [j](\x01javascript:alert(1)) [k](java\tscript:alert(1)) [l](&#106;avascript:alert(1))",
      '# t\n> q\n- a\n  1. b\n\n```js" onload="x\n<b>\n```\n| a | b |\n|---|---|\n| <i> | `c` |\n\n***x*** ~~y~~\n\n---',
      "![x](javascript:alert(1)) \\(<img src=x onerror=alert(1)>\\)",
    ];
    const element = shown(hostile.join("\n\n"));
    const all = [...element.querySelectorAll("*")];
    expect(all.map((one) => one.tagName).filter((name) => !KINDS.has(name))).toEqual([]);
    expect(all.flatMap((one) => one.getAttributeNames()).filter((name) => /^on|style|src/.test(name))).toEqual([]);
    const links = [...element.querySelectorAll("a")];
    expect(links.map((link) => link.getAttribute("href"))).toEqual(["https://ok.example/a_(b)", "http://ok.example/p.png", "https://ok.example/x", "mailto:a@b.example"]);
    expect(links.every((link) => link.rel === "noopener noreferrer" && link.target === "_blank")).toBe(true);
  });

  it("is safe even where HTML had come through", () => {
    const element = document.createElement("div");
    element.append(clean('<a href="javascript:alert(1)" onclick="x">a</a><form action="/x"><button>b</button></form><math><mi xlink:href="javascript:x">c</mi></math><iframe src="//x"></iframe><p id="root" style="position:fixed">d</p>'));
    expect(element.innerHTML).toBe('<a target="_blank" rel="noopener noreferrer">a</a>b<math><mi>c</mi></math><p>d</p>');
  });

  it("keeps formulas as they were written", () => {
    const element = shown("So \\(a\\,b\\) and $x_1$, but $5 and $6.\n\n$$\n\\frac{1}{2}\n$$\n\n\\[y\\]");
    expect([...element.querySelectorAll(".math")].map((one) => one.textContent)).toEqual(["a\\,b", "x_1", "\\frac{1}{2}", "y"]);
    expect(element.textContent).toContain("$5 and $6.");
  });

  it("has tables with pipes, task lists, notes, and underscores inside words", () => {
    const element = shown("| a |\n|---|\n| x \\| y |\n\n- [x] done\n- [ ] open\n\na_b_c is said.[^1]\n\n[^1]: there");
    expect(element.querySelector("td")?.textContent).toBe("x | y");
    expect([...element.querySelectorAll("input")].map((box) => [box.checked, box.disabled])).toEqual([[true, true], [false, true]]);
    expect(element.querySelector("em")).toBeNull();
    expect(element.querySelector(".notes li")?.textContent?.trim()).toBe("there");
    expect(element.querySelector("[id], [name]")).toBeNull();
  });

  it("says nothing by styles, which the page's policy would report", () => {
    const html = md.render("| a | b |\n|:-:|--:|\n| 1 | 2 |");
    expect(html).not.toContain("style=");
    expect(html).toContain('<td class="to-right">2</td>');
  });

  it("takes time in proportion to the text", () => {
    const began = performance.now();
    for (const part of ["*", "[", "`", "_a ", "**a ", "https://", "- ", "`a``b", "~~a", "[a](", "|a", "$", "\\(", "\\[", "$a ", "$a", "- a\n\n", "1. "]) md.render(part.repeat(32_000 / part.length));
    // the square of it would be minutes
    expect(performance.now() - began).toBeLessThan(20_000);
  });
});

describe("a text that grows", () => {
  const text = "# One\n\nA paragraph\nof two lines\n\n- a\n\n- b\n  - c\n\n```py\nx = 1\n\ny = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted\n\n$$\nx\n$$\n\n1. one\n2. two\n\nThe end *is* here.\n";

  it("becomes what the whole becomes, wherever it is cut", () => {
    const whole = md.render(text);
    for (const step of [1, 3, 7, 50]) {
      const blocks = new Blocks();
      for (let end = 0; end < text.length; end += step) blocks.of(text.slice(0, end), false);
      expect(blocks.of(text, true).map((block) => block.html).join("").replace(/\s+/g, " "), `${step} characters at a time`).toBe(whole.replace(/\s+/g, " "));
    }
  });

  it("parses what is finished once", () => {
    const blocks = new Blocks();
    const first = blocks.of("One.\n\nTwo.\n\nThr", false);
    const second = blocks.of("One.\n\nTwo.\n\nThree.\n\nFour", false);
    expect(second[0]).toBe(first[0]);
    expect(second.map((block) => block.text.trim())).toEqual(["One.", "Two.", "Three.", "Four"]);
  });

  it("begins again when its text is another", () => {
    const blocks = new Blocks();
    blocks.of("One.\n\nTwo.\n\nThree.\n\n", false);
    expect(blocks.of("Other.", false).map((block) => block.text)).toEqual(["Other."]);
  });
});

it("keeps blocks in their groups while the text grows", () => {
  const blocks = new Blocks();
  const paragraphs = Array.from({ length: 95 }, (_, n) => `Paragraph ${n}.`);
  let before: ReturnType<typeof grouped> = [];
  for (let count = 1; count <= paragraphs.length; count += 7) {
    const text = paragraphs.slice(0, count).join("\n\n");
    const now = grouped(blocks.of(text, false));
    expect(now.flat().map((block) => block.text.trim())).toEqual(paragraphs.slice(0, count));
    // all but the last are whole: none of their blocks is another one
    for (const [at, group] of before.slice(0, -1).entries()) group.forEach((block, n) => expect(now[at]![n]).toBe(block));
    before = now;
  }
  expect(before.length).toBeGreaterThan(3);
  expect(grouped([])).toEqual([]);
});
