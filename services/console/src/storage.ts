// Everything that this page stores in the browser, or keeps alive there by an address, and the one function that removes
// it. No other file uses the browser's storage or makes `blob:` addresses: a test checks that.

const PREFIX = "local2.";
const KEY = "key";
const USER = "user";
const SIGNED_OUT = "signed-out";
/** Preferences of the device. Everything else belongs to the user, and is removed when the user signs out. */
const OF_DEVICE: ReadonlySet<string> = new Set(["theme", "developer"]);

type Place = "sessionStorage" | "localStorage";
const PLACES: readonly Place[] = ["sessionStorage", "localStorage"];

let closed = false;
const addresses = new Set<string>();

/** Return the stored key, "" for none. A key of this tab alone comes before one of the whole browser. */
export const storedKey = (): string => read("sessionStorage", KEY) ?? read("localStorage", KEY) ?? "";

/** Store a key. Without `remember` the key, and all that is stored for its user, go when the tab is closed. What another
    user stored is removed; `user`: the key's user, "" where that is not known. */
export function storeKey(key: string, user: string, remember: boolean): void {
  const same = user !== "" && (read("localStorage", USER) ?? "") === user;
  const target: Place = remember ? "localStorage" : "sessionStorage";
  // the former key is replaced, not removed: other tabs would take that for a sign-out
  write(target, KEY, key);
  for (const place of PLACES) remove(place, (name) => (name === KEY ? place !== target : name === USER || (!same && !OF_DEVICE.has(name))));
  if (user) write(target, USER, user);
}

/** Return the stored value of that name, or `otherwise` when there is none or storage is switched off. */
export function kept<T>(name: string, otherwise: T): T {
  const raw = read(placeOf(name), name);
  try {
    return raw === null ? otherwise : (JSON.parse(raw) as T);
  } catch {
    return otherwise;
  }
}

/** Store a value; null and "" remove it. Nothing of a user is stored after the user has signed out. */
export function keep(name: string, value: unknown): void {
  if (closed && !OF_DEVICE.has(name)) return;
  if (value === null || value === "") remove(placeOf(name), (one) => one === name);
  else write(placeOf(name), name, JSON.stringify(value));
}

/** Return an address for the bytes. It ends with `releaseAddress`, or when the user signs out. */
export function addressOf(bytes: Blob): string {
  const address = URL.createObjectURL(bytes);
  if (closed) URL.revokeObjectURL(address);
  else addresses.add(address);
  return address;
}

export function releaseAddress(address: string): void {
  addresses.delete(address);
  URL.revokeObjectURL(address);
}

/** Remove everything of the user from the browser; from now on this page stores nothing of a user. `everywhere`: the other tabs
    sign out too; else another tab did, and the key may already be the next user's. */
export function removeUser(everywhere: boolean): void {
  closed = true;
  for (const address of [...addresses]) releaseAddress(address);
  const ofUser = (name: string) => !OF_DEVICE.has(name);
  remove("sessionStorage", ofUser);
  remove("localStorage", (name) => ofUser(name) && (everywhere || (name !== KEY && name !== USER)));
  if (!everywhere) return;
  // other tabs get an event for a change of localStorage, and for nothing else
  write("localStorage", SIGNED_OUT, String(Date.now()));
  remove("localStorage", (name) => name === SIGNED_OUT);
}

interface Elsewhere {
  /** Another tab signed out. */
  onSignOut(): void;
  /** Another tab signed in, with a key that this page does not use. */
  onSignIn(): void;
}

/** Watch what other tabs do with the stored key. `used`: the key that this page uses now, "" for none. */
export function watchOtherTabs(used: () => string, signal: AbortSignal, { onSignOut, onSignIn }: Elsewhere): void {
  const compare = () => {
    const now = storedKey();
    if (now === used()) return;
    if (now === "") onSignOut();
    else onSignIn();
  };
  addEventListener("storage", ({ key: name, newValue }) => {
    if (name === PREFIX + SIGNED_OUT && newValue !== null) onSignOut();
    else if (name === PREFIX + KEY || name === null) compare();
  }, { signal });
  // a page that comes back from the browser's cache has missed the events
  addEventListener("pageshow", (event) => { if (event.persisted) compare(); }, { signal });
}

/** What a user stores lies beside the key: a key of one tab leaves nothing behind in the browser. */
function placeOf(name: string): Place {
  return !OF_DEVICE.has(name) && read("sessionStorage", KEY) !== null ? "sessionStorage" : "localStorage";
}

// Storage may be switched off or full; then everything lasts as long as the page.
function read(place: Place, name: string): string | null {
  try {
    return window[place].getItem(PREFIX + name);
  } catch {
    return null;
  }
}

function write(place: Place, name: string, value: string): void {
  try {
    window[place].setItem(PREFIX + name, value);
  } catch {
    // as above
  }
}

function remove(place: Place, isIt: (name: string) => boolean): void {
  try {
    const storage = window[place];
    const names = Array.from({ length: storage.length }, (_, at) => storage.key(at)!);
    for (const name of names) if (name.startsWith(PREFIX) && isIt(name.slice(PREFIX.length))) storage.removeItem(name);
  } catch {
    // as above
  }
}
