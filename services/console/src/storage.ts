// All data of this page in the browser's storage or behind `blob:` addresses, and the one function that removes it. A
// test checks that no other file uses the browser's storage or makes such addresses.

const PREFIX = "local2.";
const KEY = "key";
const USER = "user";
const SIGNED_OUT = "signed-out";
/** Preferences of the device. All other data belongs to the user, and a sign-out removes it. */
const OF_DEVICE: ReadonlySet<string> = new Set(["theme", "developer"]);

type Place = "sessionStorage" | "localStorage";
const PLACES: readonly Place[] = ["sessionStorage", "localStorage"];

let closed = false;
const addresses = new Set<string>();

/** Return the stored key, "" for none. A key of this tab goes before one of the whole browser. */
export const storedKey = (): string => read("sessionStorage", KEY) ?? read("localStorage", KEY) ?? "";

/** Store a key, and remove the data of another user. Without `remember`, the key and its user's data last as long as the
    tab. `user`: the key's user, "" if not known. */
export function storeKey(key: string, user: string, remember: boolean): void {
  const same = user !== "" && (read("localStorage", USER) ?? "") === user;
  const target: Place = remember ? "localStorage" : "sessionStorage";
  // Replace the former key without removing it: other tabs would take a removal for a sign-out.
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

/** Store a value; null and "" remove it. After the sign-out, values of the user are ignored. */
export function keep(name: string, value: unknown): void {
  if (closed && !OF_DEVICE.has(name)) return;
  if (value === null || value === "") remove(placeOf(name), (one) => one === name);
  else write(placeOf(name), name, JSON.stringify(value));
}

/** Return an address for the bytes. It is valid until `releaseAddress` or the sign-out. */
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

/** Remove all data of the user from the browser; from now on this page stores none. `everywhere`: sign out the other tabs
    too; false: another tab has signed out, and the stored key may already be the next user's. */
export function removeUser(everywhere: boolean): void {
  closed = true;
  for (const address of [...addresses]) releaseAddress(address);
  const ofUser = (name: string) => !OF_DEVICE.has(name);
  remove("sessionStorage", ofUser);
  remove("localStorage", (name) => ofUser(name) && (everywhere || (name !== KEY && name !== USER)));
  if (!everywhere) return;
  // Only a change of localStorage sends an event to other tabs.
  write("localStorage", SIGNED_OUT, String(Date.now()));
  remove("localStorage", (name) => name === SIGNED_OUT);
}

interface Elsewhere {
  /** Another tab signed out. */
  onSignOut(): void;
  /** Another tab signed in, with a key that this page does not use. */
  onSignIn(): void;
}

/** Watch other tabs' changes of the stored key. `used`: returns the key of this page, "" for none. */
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
  // A page from the browser's back/forward cache has missed the events.
  addEventListener("pageshow", (event) => { if (event.persisted) compare(); }, { signal });
}

/** Return the place of a value. A user's values are in the same storage as the key: a key of one tab leaves no data. */
function placeOf(name: string): Place {
  return !OF_DEVICE.has(name) && read("sessionStorage", KEY) !== null ? "sessionStorage" : "localStorage";
}

// Storage may be switched off or full; then the data lasts as long as the page.
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
