// Files in the page: chips and small pictures of them, and the dialog that shows one whole.

import { createContext, useCallback, useContext, useEffect, useLayoutEffect, useRef, useState, type ReactNode } from "react";
import { ApiError } from "./api/http";
import { about, bytesOf, kindOf, saveBytes, type FileOf } from "./files";
import { addressOf, releaseAddress } from "./storage";
import { Dialog } from "./ui/parts";
import { Icon } from "./ui/icons";

// A very long text would block the page; the user can save all of it.
const MOST_CHARS = 200_000;
// Delay before the request for a thumbnail, in ms: pictures that scroll past are not loaded.
const THUMBNAIL_DELAY = 150;

const Opener = createContext<(file: FileOf) => void>(() => {});

/** Returns the function that opens a file: images and texts in a dialog, PDF in a tab; others are saved. */
export const useOpenFile = (): ((file: FileOf) => void) => useContext(Opener);

/** Provides its children with `useOpenFile`, and shows the opened file. */
export function FileViewer({ onError, children }: { onError(error: unknown): void; children: ReactNode }) {
  const [file, show] = useState<FileOf | null>(null);
  const tabs = useRef(new Set<Window>());
  // A tab with a PDF closes with the page: the next user must not see it.
  useLayoutEffect(() => {
    const close = () => { for (const tab of tabs.current) tab.close(); };
    addEventListener("pagehide", close);
    return () => { removeEventListener("pagehide", close); close(); };
  }, []);
  const open = useCallback((wanted: FileOf) => {
    const kind = kindOf(wanted);
    if (kind === "image" || kind === "text") return show(wanted);
    // Open the tab now: a browser lets a page open tabs only while it handles a click.
    const tab = kind === "pdf" ? window.open("", "_blank") : null;
    if (tab) tabs.current.add(tab);
    bytesOf(wanted).then((bytes) => {
      if (!tab) return saveBytes(wanted.name, bytes);
      // The address stays until the user signs out: the user may reload the tab.
      tab.location.replace(addressOf(bytes));
    }, (error: unknown) => { tab?.close(); onError(error); });
  }, [onError]);
  return (
    <Opener.Provider value={open}>
      {children}
      <Dialog open={file !== null} onClose={() => show(null)} title={file?.name ?? ""} wide={file && kindOf(file) === "image" ? "full" : true}>
        {file && <Whole key={file.id} file={file} onError={onError} />}
      </Dialog>
    </Opener.Provider>
  );
}

function Whole({ file, onError }: { file: FileOf; onError(error: unknown): void }) {
  const { bytes, address, wrong } = useBytes(file, null, 0);
  const [text, setText] = useState<string | null>(null);
  const [large, enlarge] = useState(false);
  const isText = kindOf(file) === "text";
  useEffect(() => {
    if (bytes && isText) void bytes.text().then(setText, onError);
  }, [bytes, isText, onError]);
  return (
    <>
      {wrong && <p className="error-text" role="alert">{wrong}</p>}
      {!wrong && !bytes && <p className="dim" role="status">Loading …</p>}
      {address && !isText && (
        <button type="button" className={large ? "picture-whole large" : "picture-whole"} aria-pressed={large} title={large ? "Fit it into the window" : "Show every pixel"} onClick={() => enlarge(!large)}>
          <img src={address} alt={file.name} />
        </button>
      )}
      {text !== null && (
        <>
          <pre className="file-text" tabIndex={0} dir="auto">{text.slice(0, MOST_CHARS)}</pre>
          {text.length > MOST_CHARS && <p className="note">This is its beginning. Save the file to read all of it.</p>}
        </>
      )}
      <div className="actions file-foot">
        <span className="dim spring">{about(file)}</span>
        <button type="button" className="quiet" disabled={!bytes} onClick={() => bytes && saveBytes(file.name, bytes)}>Save the file</button>
      </div>
    </>
  );
}

/** Return a file's bytes and their address, valid while the component is mounted. `local`: the bytes, if the page has
    them. `wait`: in ms before the request. */
function useBytes(file: FileOf, local: Blob | null, wait: number): { bytes: Blob | null; address: string; wrong: string } {
  const [state, set] = useState<{ bytes: Blob | null; address: string; wrong: string }>({ bytes: null, address: "", wrong: "" });
  const { id, type } = file;
  useEffect(() => {
    const stop = new AbortController();
    let address = "";
    const here = (bytes: Blob) => {
      if (stop.signal.aborted) return;
      address = addressOf(bytes);
      set({ bytes, address, wrong: "" });
    };
    const failed = (error: unknown) => {
      if (stop.signal.aborted) return;
      const gone = error instanceof ApiError && error.status === 404;
      set({ bytes: null, address: "", wrong: gone ? "This file was deleted." : error instanceof Error ? error.message : String(error) });
    };
    const timer = local ? 0 : window.setTimeout(() => void bytesOf({ id, name: "", type: type ?? "" }, stop.signal).then(here, failed), wait);
    if (local) here(local);
    return () => {
      clearTimeout(timer);
      stop.abort();
      if (address) releaseAddress(address);
    };
  }, [id, type, local, wait]);
  return state;
}

interface AttachmentProps {
  file: FileOf;
  /** The bytes, if the page has them. */
  local?: Blob | null;
  children?: ReactNode;
}

/** A file of a question: a small picture, or a chip with its name; a click opens it. */
export function Attachment({ file, local = null, children }: AttachmentProps) {
  const open = useOpenFile();
  const [broken, setBroken] = useState(false);
  const isImage = kindOf(file) === "image" && !file.deleted && !broken;
  if (file.deleted) return <li className="chip gone"><Icon name="clip" /> <s>{file.name}</s> <span className="dim">deleted</span>{children}</li>;
  if (!file.id && !isImage) return <li className="chip"><Icon name="clip" /> {file.name}{children}</li>;
  if (isImage) return <li className="picture-item"><Thumbnail file={file} local={local} onOpen={file.id ? () => open(file) : null} onBroken={() => setBroken(true)} />{children}</li>;
  return (
    <li className="chip">
      <button type="button" className="file" title={about(file) || undefined} onClick={() => open(file)}><Icon name={kindOf(file) === "other" ? "clip" : "page"} /> <span>{file.name}</span></button>
      {children}
    </li>
  );
}

function Thumbnail({ file, local, onOpen, onBroken }: { file: FileOf; local: Blob | null; onOpen: (() => void) | null; onBroken(): void }) {
  const { address, wrong } = useBytes(file, local, THUMBNAIL_DELAY);
  useEffect(() => { if (wrong) onBroken(); }, [wrong]);
  return (
    <button type="button" className="thumbnail" disabled={!onOpen} title={[file.name, about(file)].filter(Boolean).join("\n")} aria-label={`Show ${file.name}`} onClick={() => onOpen?.()}>
      {address && <img src={address} alt="" onError={onBroken} />}
    </button>
  );
}
