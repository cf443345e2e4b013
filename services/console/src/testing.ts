/** What the tests of pages share. */

import { act } from "react";

/** Wait until a fact is true, while the page goes on; at most some seconds. */
export async function until(fact: () => unknown): Promise<void> {
  for (let turn = 0; turn < 500; turn += 1) {
    await act(() => new Promise((resolve) => setTimeout(resolve, 5)));
    if (fact()) return;
  }
  throw new Error(`it did not become true: ${String(fact)}\n${document.body.textContent}`);
}

/** Return the button or menu item with this label or text. */
export const button = (name: string, of: ParentNode = document) =>
  [...of.querySelectorAll<HTMLButtonElement>("button, [role=menuitem]")].find((one) => (one.getAttribute("aria-label") ?? one.textContent!.trim()) === name)!;

export const press = (element: HTMLElement) => act(async () => element.click());
