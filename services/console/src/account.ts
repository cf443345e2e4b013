// The user of the page: sign-in, and sign-out, which removes all data of the user.

import { flushSync } from "react-dom";
import { ApiError, endRequests, isGoodKey, redeem, useKey } from "./api/http";
import { Store } from "./chat/store";
import { removeUser, storeKey, storedKey, watchOtherTabs } from "./storage";

/** opening: not known yet. in: `withKey` is false for a server that needs no key. out: the page shows `reason`. */
export type Access = { at: "opening" } | { at: "in"; withKey: boolean } | { at: "out"; reason: string };

/** The user of this document. A sign-in after a sign-out reloads the page: the next user gets a document without code or
    values of the former user. */
export class Account extends Store {
  access: Access = { at: "opening" };
  #key = "";
  #used = false;
  #stop = new AbortController();

  constructor(private readonly renew: () => void = () => location.reload()) {
    super();
  }

  /** Sign in by the one-time link (`#once=…`) of the address, or with the stored key. */
  async open(): Promise<void> {
    const { signal } = (this.#stop = new AbortController());
    const trouble = await this.#byLink();
    watchOtherTabs(() => this.#key, signal, {
      onSignOut: () => { if (this.#key) this.#out("You signed out in another tab.", false); },
      onSignIn: this.renew,
    });
    addEventListener("hashchange", () => { if (tokenOf(location.hash)) this.renew(); }, { signal });
    const key = storedKey();
    try {
      if (key === "" && !(await isGoodKey(""))) return this.#set({ at: "out", reason: trouble });
    } catch {
      // The page itself waits for a server that does not answer.
    }
    this.#enter(key);
  }

  close(): void {
    this.#stop.abort();
  }

  /** Sign in with a key. Return whether the key is valid. Raises ApiError when the server cannot be asked. */
  async signIn(key: string, remember: boolean): Promise<boolean> {
    if (!(await isGoodKey(key))) return false;
    storeKey(key, "", remember);
    // Without browser storage the key lasts as long as the document.
    if (this.#used && storedKey() === key) this.renew();
    else this.#enter(key);
    return true;
  }

  /** Remove all data of the user from the screen, from memory and from the browser, in all tabs. */
  signOut(reason = ""): void {
    this.#out(reason, true);
  }

  #enter(key: string): void {
    this.#key = key;
    this.#used = true;
    useKey(key, () => {
      const now = storedKey();
      // Another tab has signed in with a newer key.
      if (now && now !== key) this.renew();
      else this.signOut("This key is not valid.");
    });
    this.#set({ at: "in", withKey: key !== "" });
  }

  #out(reason: string, everywhere: boolean): void {
    if (this.access.at === "out") return;
    // Unmount the pages first: their cleanup still needs the key.
    flushSync(() => this.#set({ at: "out", reason }));
    this.#key = "";
    endRequests();
    removeUser(everywhere);
    history.replaceState(null, "", location.pathname + location.search);
    document.title = "LoCAL2";
  }

  /** Exchange the link's token for a key, and remove it from the address. Return the error's text, "" without one. */
  async #byLink(): Promise<string> {
    const fragment = new URLSearchParams(location.hash.slice(1));
    const token = tokenOf(location.hash);
    if (!token) return "";
    fragment.delete("once");
    const rest = fragment.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
    try {
      const { key, user_id } = await redeem(token);
      // The link's key expires after a week.
      storeKey(key, user_id, true);
      return "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return `${error.message}. "local2 keys link" prints another one.`;
    }
  }

  #set(access: Access): void {
    this.access = access;
    this.changed();
  }
}

const tokenOf = (hash: string): string => new URLSearchParams(hash.slice(1)).get("once") ?? "";
