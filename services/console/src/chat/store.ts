// Something that is looked at: React reads a version, and is told when it is another.

import { useSyncExternalStore } from "react";

export class Store {
  #listeners = new Set<() => void>();
  #version = 0;
  #frame = 0;

  subscribe = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  };

  version = (): number => this.#version;

  /** Something is different; whoever looks is told at once. */
  changed(): void {
    this.#version += 1;
    for (const listener of this.#listeners) listener();
  }

  /** The same, at most once a frame. Frames stop in a hidden tab; its text may wait until it is seen. */
  changedSoon(): void {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.changed();
    });
  }
}

/** Draws the component again whenever the store changes. */
export function useStore(store: Store): number {
  return useSyncExternalStore(store.subscribe, store.version);
}
