// The one Trusted Types policy. HTML is read with it in a document that runs and loads nothing, where DOMPurify takes it
// apart; what comes out is nodes, so that no text of this page is ever made into HTML where it would be shown.

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
  IN_PLACE: true,
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

// one document for all: to make one for each piece of an answer costs more than all the rest of showing it
const inert = document.implementation.createHTMLDocument("");

// once: read anew for each piece of an answer, it costs more than the cleaning
DOMPurify.setConfig(RULES as unknown as Parameters<typeof DOMPurify.setConfig>[0]);

/** The nodes of a text of HTML, without anything that loads, runs or leads elsewhere than by a click. */
export function clean(html: string): DocumentFragment {
  const place = inert.createElement("div");
  place.innerHTML = policy ? policy.createHTML(html) : html;
  DOMPurify.sanitize(place);
  const found = document.createDocumentFragment();
  found.append(...place.childNodes);
  return found;
}
