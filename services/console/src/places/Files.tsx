// The page of the user's files: list, search, add and delete.

import { useCallback, useEffect, useRef, useState } from "react";
import { sleep } from "../api/events";
import { call } from "../api/http";
import type { components } from "../api/schema";
import type { StoredFile } from "../api/types";
import { useOpenFile } from "../FileViewer";
import { addFile, bytesOf, saveBytes, sizeOf, typeName } from "../files";
import { trouble } from "../operate/asking";
import { Confirm, Grid, Note, State, Waiting, When, type Column, type Question } from "../operate/parts";
import { Icon } from "../ui/icons";
import { IconButton } from "../ui/parts";
import { counted } from "../words";
import "../operate/operate.css";

const PAGE = 100;
// Interval in ms between requests while the server reads a file.
const READING = 1_500;
// Delay in ms between a key press in the search field and the request.
const TYPING = 200;

/** A file during its upload, or a refused one. */
interface Incoming {
  key: number;
  name: string;
  wrong: string;
}

const STATES = { ready: "ready", reading: "reading …", failed: "failed" } as const;
let count = 0;

export default function Files({ onError }: { onError(error: unknown): void }) {
  const [files, setFiles] = useState<StoredFile[] | null>(null);
  const [total, setTotal] = useState(0);
  const [cursor, setCursor] = useState<number | null>(null);
  const [words, setWords] = useState("");
  const [wrong, setWrong] = useState("");
  const [incoming, setIncoming] = useState<Incoming[]>([]);
  const [question, ask] = useState<Question | null>(null);
  const [dropping, setDropping] = useState(false);
  const picker = useRef<HTMLInputElement>(null);
  const asked = useRef(0);
  const open = useOpenFile();

  const load = useCallback(async (after: number | null = null, many = PAGE) => {
    const own = (asked.current += 1);
    try {
      const page = await call<components["schemas"]["FileList"]>("GET", `files?limit=${many}&search=${encodeURIComponent(words.trim())}${after === null ? "" : `&cursor=${after}`}`);
      // A later search or another page has replaced this request.
      if (own !== asked.current) return;
      setFiles((known) => (after === null ? page.files : [...(known ?? []), ...page.files]));
      setTotal(page.total);
      setCursor(page.cursor);
      setWrong("");
    } catch (error) {
      if (own === asked.current) setWrong(trouble(error));
    }
  }, [words]);
  useEffect(() => {
    const timer = setTimeout(() => void load(), words ? TYPING : 0);
    return () => clearTimeout(timer);
  }, [load, words]);
  const reading = files?.some(({ state }) => state === "reading") ?? false;
  useEffect(() => {
    if (!reading) return undefined;
    const stop = new AbortController();
    void (async () => {
      while (!stop.signal.aborted) {
        await sleep(READING, stop.signal);
        if (!stop.signal.aborted && !document.hidden) await load(null, Math.min(500, Math.max(PAGE, files?.length ?? 0)));
      }
    })();
    return () => stop.abort();
  }, [reading, load, files?.length]);

  async function add(list: Iterable<File>) {
    await Promise.all([...list].map(async (file) => {
      const entry: Incoming = { key: (count += 1), name: file.name, wrong: "" };
      setIncoming((known) => [...known, entry]);
      try {
        await addFile(file);
        setIncoming((known) => known.filter(({ key }) => key !== entry.key));
      } catch (error) {
        setIncoming((known) => known.map((one) => (one.key === entry.key ? { ...one, wrong: trouble(error) } : one)));
      }
    }));
    await load();
  }

  const columns: Column<StoredFile>[] = [
    { name: "Name", wide: true, value: (one) => one.name, cell: (one) => <><button type="button" className="link" onClick={() => open(one)}><span dir="auto">{one.name}</span></button>{one.reason && <p className="dim reason" dir="auto">{one.reason}</p>}</> },
    { name: "Kind", value: (one) => [typeName(one.type), one.pages && counted(one.pages, "page")].filter(Boolean).join(", ") },
    { name: "Size", number: true, value: (one) => one.size, cell: (one) => sizeOf(one.size) },
    { name: "Added", number: true, value: (one) => one.added, cell: (one) => <When ms={one.added} /> },
    { name: "State", value: (one) => STATES[one.state], cell: (one) => <State fine={one.state === "ready" ? (one.reason ? "fair" : "good") : one.state === "failed" ? "poor" : ""}>{STATES[one.state]}</State> },
  ];
  const remove = (one: StoredFile) => ask({
    title: "Delete this file?", words: `“${one.name}” is removed for good, with all that a search finds of it. Chats that have it stay, without the file.`, yes: "Delete it",
    act: () => void call("DELETE", `files/${encodeURIComponent(one.id)}`).then(() => {
      setFiles((known) => known?.filter(({ id }) => id !== one.id) ?? null);
      setTotal((before) => before - 1);
    }, onError),
  });
  return (
    <div className={dropping ? "operate dropping" : "operate"}
      onDragOver={(event) => { event.preventDefault(); setDropping(true); }}
      onDragLeave={(event) => { if (!event.currentTarget.contains(event.relatedTarget as Node | null)) setDropping(false); }}
      onDrop={(event) => { event.preventDefault(); setDropping(false); void add(event.dataTransfer.files); }}>
      <main className="operate-page" tabIndex={0}>
        <div className="operate-panel">
          <section>
            <h1 className="page-title">Files</h1>
            <p className="dim">Your own. The assistant searches their text when you ask about them. Text, Markdown, HTML, PDF and images.</p>
            <Note>{wrong}</Note>
            {incoming.length > 0 && (
              <ul className="attached" aria-label="Files on their way">
                {incoming.map((one) => (
                  <li key={one.key} className="chip">
                    <Icon name="clip" /> {one.name} {one.wrong ? <span className="error-text" role="alert">{one.wrong}</span> : <span className="dim" role="status">is being added …</span>}
                    {one.wrong && <IconButton icon="close" label={`Leave out ${one.name}`} onClick={() => setIncoming((known) => known.filter(({ key }) => key !== one.key))} />}
                  </li>
                ))}
              </ul>
            )}
            <div className="grid-tools">
              <label htmlFor="file-search" className="hidden-text">Search files by name</label>
              <input id="file-search" type="search" placeholder="Search by name" maxLength={200} autoComplete="off" value={words} onChange={(event) => setWords(event.target.value)} />
              <input ref={picker} type="file" multiple hidden aria-label="Files to add" tabIndex={-1} onChange={(event) => { void add([...(event.target.files ?? [])]); event.target.value = ""; }} />
              <button type="button" className="primary" onClick={() => picker.current?.click()}>Add files</button>
              <span className="dim grid-count" role="status">{files ? counted(total, "file") : ""}</span>
            </div>
            {!files && !wrong && <Waiting />}
            {files && (
              <Grid name="Files" id="files-table" rows={files} keyOf={(one) => one.id} columns={columns} searched={false} empty={words.trim() ? "No file has this in its name." : "There are no files yet. Add some here, or attach them to a question."}
                actions={(one) => (
                  <>
                    <IconButton icon="save" label={`Save ${one.name}`} onClick={() => void bytesOf(one).then((bytes) => saveBytes(one.name, bytes), onError)} />
                    <IconButton icon="trash" label={`Delete ${one.name}`} onClick={() => remove(one)} />
                  </>
                )} />
            )}
            {cursor !== null && <button type="button" className="tool" onClick={() => void load(cursor)}>Older ones ({Math.max(0, total - (files?.length ?? 0))} more)</button>}
          </section>
        </div>
      </main>
      <Confirm question={question} onClose={() => ask(null)} />
    </div>
  );
}
