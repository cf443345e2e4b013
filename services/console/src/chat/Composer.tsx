import { useEffect, useImperativeHandle, useRef, useState, type Ref } from "react";
import { call } from "../api/http";
import { Attachment } from "../FileViewer";
import { addFile, type FileOf } from "../files";
import { IconButton } from "../ui/parts";
import { Icon } from "../ui/icons";
import type { ChatSettings } from "./ChatSettings";
import type { Ask } from "./conversation";
import { keep, kept } from "../storage";
import { counted } from "../words";

const MOST_CHARS = 400_000;
const MOST_FILES = 16;

export interface ComposerHandle {
  focus(): void;
  /** Puts a text with its files there, to be changed and sent. */
  put(text: string, files?: readonly FileOf[]): void;
}

interface ComposerProps {
  ref: Ref<ComposerHandle>;
  sessionId: string | null;
  settings: ChatSettings;
  /** How many questions of the session are not answered yet. */
  waiting: number;
  onAsk(ask: Ask): Promise<void>;
  onStop(): void;
  onSettings(change: Partial<ChatSettings>): void;
  onOptions(): void;
  /** null: the chat has no state yet. */
  onState: (() => void) | null;
  onError(error: unknown): void;
}

let count = 0;

interface Attached extends FileOf {
  /** Unique on this page. */
  key: number;
  /** "" during the upload. */
  id: string;
  trouble: string;
  /** The bytes, if they come from this page. */
  local: Blob | null;
}

export function Composer({ ref, sessionId, settings, waiting, onAsk, onStop, onSettings, onOptions, onState, onError }: ComposerProps) {
  const draft = `draft.${sessionId ?? "new"}`;
  const [text, setText] = useState(() => kept(draft, ""));
  const [files, setFiles] = useState<Attached[]>([]);
  const [dropping, setDropping] = useState(false);
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const loading = files.some((file) => !file.id && !file.trouble);
  // A message may consist of files alone.
  const empty = !text.trim() && !files.some((file) => file.id);

  useImperativeHandle(ref, () => ({
    focus: () => field.current?.focus({ preventScroll: true }),
    put: (words, known = []) => {
      write(words);
      setFiles(known.map((file) => ({ ...file, key: (count += 1), trouble: "", local: null })));
      field.current?.focus();
    },
  }));

  useEffect(() => {
    const element = field.current!;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight + 2, 260)}px`;
  }, [text]);

  function write(words: string) {
    setText(words);
    keep(draft, words);
  }

  async function send() {
    const own = files.filter((file) => file.id).map(({ id, name, type, size, pages }) => ({ id, name, type, size, pages }));
    if (empty || loading) return;
    const before = { text, files };
    write("");
    setFiles([]);
    try {
      await onAsk({ query: text.trim() ? text : "", files: own });
    } catch (error) {
      // refused: nothing that was written is lost
      write(before.text);
      setFiles(before.files);
      onError(error);
    }
  }

  async function attach(list: Iterable<File>) {
    for (const file of [...list].slice(0, MOST_FILES - files.length)) {
      const entry: Attached = { name: file.name || "pasted image", type: file.type, size: file.size, key: (count += 1), id: "", trouble: "", local: file };
      setFiles((known) => [...known, entry]);
      const done = (change: Partial<Attached>) => setFiles((known) => known.map((one) => (one === entry ? Object.assign(entry, change) : one)).slice());
      try {
        const stored = await addFile(file);
        const { id, name, type, size } = stored;
        done({ id, name, type, size, pages: stored.pages ?? null, trouble: stored.state === "failed" ? (stored.reason ?? "it could not be read") : "" });
      } catch (error) {
        done({ trouble: error instanceof Error ? error.message : String(error) });
      }
    }
  }

  return (
    <form
      className={dropping ? "composer dropping" : "composer"}
      onSubmit={(event) => { event.preventDefault(); void send(); }}
      onDragOver={(event) => { event.preventDefault(); setDropping(true); }}
      onDragLeave={() => setDropping(false)}
      onDrop={(event) => { event.preventDefault(); setDropping(false); void attach(event.dataTransfer.files); }}
    >
      {files.length > 0 && (
        <ul className="attached" aria-label="Files of the question">
          {files.map((file) => (
            <Attachment key={file.key} file={file} local={file.local}>
              {file.trouble ? <span className="error-text">{file.trouble}</span> : !file.id && <span className="dim">…</span>}
              <IconButton icon="close" label={`Remove ${file.name}`} onClick={() => setFiles(files.filter((one) => one !== file))} />
            </Attachment>
          ))}
        </ul>
      )}
      <label htmlFor="question" className="hidden-text">Your question</label>
      <textarea
        id="question" ref={field} rows={1} maxLength={MOST_CHARS} value={text} dir="auto" autoComplete="off" enterKeyHint="send"
        placeholder={waiting ? "Ask the next question: it waits for its turn" : "Ask something"}
        onChange={(event) => write(event.target.value)}
        onPaste={(event) => {
          if (!event.clipboardData.files.length) return;
          event.preventDefault();
          void attach(event.clipboardData.files);
        }}
        onKeyDown={(event) => {
          // Enter that ends the choice of a character in an input method is not for us
          if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
          event.preventDefault();
          void send();
        }}
      />
      <div className="composer-row">
        <input ref={picker} type="file" multiple hidden aria-label="Files" tabIndex={-1} onChange={(event) => { void attach(event.target.files ?? []); event.target.value = ""; }} />
        <IconButton icon="clip" label="Add files or images" onClick={() => picker.current?.click()} />
        <label htmlFor="mode" className="hidden-text">Mode</label>
        <select id="mode" value={settings.mode} onChange={(event) => onSettings({ mode: event.target.value as ChatSettings["mode"] })}>
          <option value="chat">Chat</option>
          <option value="committee">Committee</option>
        </select>
        <button type="button" className="quiet" onClick={onOptions}><Icon name="tune" /> <span className="wide-only">{chosen(settings)}</span><span className="hidden-text">Settings of this chat</span></button>
        {onState && <IconButton icon="messages" label="Conversation state: what the model sees" onClick={onState} />}
        <span className="spring" />
        {waiting > 0 && <button type="button" id="stop" className="round stop" aria-label="Stop" title="Stop (Esc)" onClick={onStop}><Icon name="stop" /></button>}
        <button type="submit" id="send" className="round primary" aria-label={waiting ? "Send: it waits for its turn" : "Send"} title="Send (Enter)" disabled={empty || loading}><Icon name="send" /></button>
      </div>
    </form>
  );
}

function chosen({ model, temperature, personas, mode, systemPrompt }: ChatSettings): string {
  const parts = [model, temperature === null ? "" : `temperature ${temperature}`, systemPrompt && "own instructions", mode === "committee" && personas.length ? counted(personas.length, "persona") : ""];
  return parts.filter(Boolean).join(" · ") || "Usual settings";
}

/** The names of those who can deliberate; empty where the server does not tell. */
export async function personaNames(): Promise<string[]> {
  try {
    const { personas } = await call<{ personas: (string | { name: string })[] }>("GET", "personas");
    return personas.map((one) => (typeof one === "string" ? one : one.name));
  } catch {
    return [];
  }
}
