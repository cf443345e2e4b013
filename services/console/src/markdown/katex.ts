// Formulas as MathML, which browsers draw themselves: no fonts to load and no styles inside the text.

import katex from "katex";
import { clean } from "../trusted";

/** The nodes of a formula; null when it cannot be read, and stays as it was written. */
export function formula(tex: string, display: boolean): DocumentFragment | null {
  try {
    const html = katex.renderToString(tex, { output: "mathml", displayMode: display, throwOnError: true, strict: false, trust: false, maxExpand: 500, maxSize: 20 });
    // the source stands beside the formula for other programs; here it would be shown twice. No styles: the policy
    // forbids them, and its report would come from reading them alone
    return clean(html.replace(/<annotation[^>]*>[^]*?<\/annotation>/g, "").replace(/ style="[^"]*"/g, ""));
  } catch {
    return null;
  }
}
