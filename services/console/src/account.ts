// Whose page this is: signing in, and signing out, after which nothing of the user is left.

import { flushSync } from "react-dom";
import { ApiError, endRequests, isGoodKey, redeem, useKey } from "./api/http";
import { Store } from "./chat/store";
import { removeUser, storeKey, storedKey, watchOtherTabs } from "./storage";

/** opening: it is being found out. in: `withKey` is false where the server needs no key. out: `reason` is shown. */
export type Access = { at: "opening" } | { at: "in"; withKey: boolean } | { at: "out"; reason: string };

/** The user of this document. The document of a user who signed out is never used for the next one: signing in again
    loads the page anew, so that no code and no value of the former user is left in it. */
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
      // the page itself waits for a server that is away
    }
    this.#enter(key);
  }

  close(): void {
    this.#stop.abort();
  }

  /** Sign in with a key. Returns whether the key is good. Raises ApiError when the server cannot be asked. */
  async signIn(key: string, remember: boolean): Promise<boolean> {
    if (!(await isGoodKey(key))) return false;
    storeKey(key, "", remember);
    // where storage is switched off, the key lasts as long as the document
    if (this.#used && storedKey() === key) this.renew();
    else this.#enter(key);
    return true;
  }

  /** Remove everything of the user: from the screen, from memory and from the browser, in all tabs. */
  signOut(reason = ""): void {
    this.#out(reason, true);
  }

  #enter(key: string): void {
    this.#key = key;
    this.#used = true;
    useKey(key, () => {
      const now = storedKey();
      // another tab has signed in with a newer key
      if (now && now !== key) this.renew();
      else this.signOut("This key is not valid.");
    });
    this.#set({ at: "in", withKey: key !== "" });
  }

  #out(reason: string, everywhere: boolean): void {
    if (this.access.at === "out") return;
    // takes the pages away; what they do when they close still has the key
    flushSync(() => this.#set({ at: "out", reason }));
    this.#key = "";
    endRequests();
    removeUser(everywhere);
    history.replaceState(null, "", location.pathname + location.search);
    document.title = "LoCAL2";
  }

  /** Exchange the link's token, which is removed from the address; returns why that failed, "" for no failure. */
  async #byLink(): Promise<string> {
    const fragment = new URLSearchParams(location.hash.slice(1));
    const token = tokenOf(location.hash);
    if (!token) return "";
    fragment.delete("once");
    const rest = fragment.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
    try {
      const { key, user_id } = await redeem(token);
      // the link's key ends after a week by itself
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
