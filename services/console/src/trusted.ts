// The one Trusted Types policy. DOMPurify reads with it what it takes apart, in a document that runs nothing; what
// comes out is nodes, so that no text of this page is ever made into HTML where it would be shown.

import DOMPurify from "dompurify";

interface Policy { createHTML(text: string): string }
interface Factory { createPolicy(name: string, rules: { createHTML(text: string): string; createScriptURL(url: string): string }): Policy }

const factory = (globalThis as { trustedTypes?: Factory }).trustedTypes;
const policy = factory?.createPolicy("local2", {
  createHTML: (text) => text,
  createScriptURL: (url) => { throw new TypeError(`no script is loaded from ${url}`); },
});

const ADDRESS = /^(?:https?|mailto):/i;
const RULES = {
  RETURN_DOM_FRAGMENT: true,
  USE_PROFILES: { html: true, mathMl: true },
  // nothing that is loaded, sent, or drawn over the page
  FORBID_TAGS: ["img", "audio", "video", "picture", "source", "track", "form", "button", "textarea", "select", "option", "style", "dialog", "map", "area", "label"],
  FORBID_ATTR: ["style", "id", "name", "src", "srcset", "background", "poster", "action", "formaction", "ping", "autofocus", "popover", "tabindex"],
  ALLOWED_URI_REGEXP: ADDRESS,
  ALLOW_DATA_ATTR: true,
  ...(policy ? { TRUSTED_TYPES_POLICY: policy } : {}),
} as const;

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
  if (node.nodeName === "INPUT") {
    // task lists: a box that says something and takes nothing
    node.setAttribute("type", "checkbox");
    node.setAttribute("disabled", "");
  }
});

// once: read anew for each piece of an answer, it costs more than the cleaning
DOMPurify.setConfig(RULES as unknown as Parameters<typeof DOMPurify.setConfig>[0]);

/** The nodes of a text of HTML, without anything that loads, runs or leads elsewhere than by a click. */
export function clean(html: string): DocumentFragment {
  return DOMPurify.sanitize(html) as unknown as DocumentFragment;
}
