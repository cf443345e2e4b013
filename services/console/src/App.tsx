// The page: puts its places together, and listens to keyboard, address and other tabs.

import { Suspense, lazy, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { ApiError, readiness } from "./api/http";
import { sleep } from "./api/events";
import type { Readiness, Reward, Session } from "./api/types";
import { Chat } from "./chat/Chat";
import type { ComposerHandle } from "./chat/Composer";
import { Conversation, everyTurn } from "./chat/conversation";
import { asJson, asMarkdown, fileName, save } from "./chat/exporting";
import { SessionList } from "./chat/sessions";
import { Sidebar, Undo } from "./chat/Sidebar";
import { useStore } from "./chat/store";
import { FileViewer } from "./FileViewer";
import { PLACES, placeOf } from "./operate/places";
import { keep, kept } from "./storage";
import { THEMES, type Theme } from "./theme";
import { Icon } from "./ui/icons";
import { Palette } from "./ui/Palette";
import { Dialog, IconButton, Menu, type Choice } from "./ui/parts";
import { counted } from "./words";

const About = lazy(() => import("./places/About"));
const Files = lazy(() => import("./places/Files"));
const Operate = lazy(() => import("./operate/Operate"));

const READINESS_INTERVAL = 10_000;
const LIST_INTERVAL = 10_000;
const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("local2");

interface Address {
  session: string | null;
  operate: string | null;
  files: boolean;
}

const CHAT = { operate: null, files: false } as const;

function addressed(): Address {
  const fragment = new URLSearchParams(location.hash.slice(1));
  return { session: fragment.get("session"), operate: fragment.get("operate"), files: fragment.has("files") };
}

function goTo({ session, operate, files }: Address): void {
  const hash = files ? "#files" : operate ? `#operate=${encodeURIComponent(operate)}` : session ? `#session=${encodeURIComponent(session)}` : "";
  if (location.hash !== hash) history.pushState(null, "", location.pathname + location.search + hash);
}

const isChat = ({ operate, files }: Address): boolean => !operate && !files;

interface AppProps {
  theme: Theme;
  onTheme(theme: Theme): void;
  /** null: the server needs no key, so that there is nothing to sign out of. */
  onSignOut: (() => void) | null;
}

export function App({ theme, onTheme, onSignOut }: AppProps) {
  const [trouble, setTrouble] = useState("");
  const [ready, setReady] = useState<Readiness | null>(null);
  const [address, setAddress] = useState<Address>(addressed);
  const [about, setAbout] = useState(false);
  const [drawer, setDrawer] = useState(false);
  const [palette, setPalette] = useState(false);
  const [developer, setDeveloper] = useState(() => kept("developer", false));
  const composer = useRef<ComposerHandle>(null);

  const report = useCallback((error: unknown) => {
    setTrouble(error instanceof Error ? error.message : String(error));
  }, []);

  const sessions = useMemo(() => new SessionList(report), [report]);
  const conversation = useMemo(() => new Conversation({
    onChange: () => {
      const session = conversation.sessionId;
      const now = addressed();
      if (isChat(now) && now.session !== session && session) history.replaceState(null, "", `${location.pathname}${location.search}#session=${encodeURIComponent(session)}`);
      setAddress(addressed());
      sessions.refresh().catch(() => {});
      tabs?.postMessage({ session });
    },
    onVote: (queryId, reward) => tabs?.postMessage({ session: conversation.sessionId, vote: { queryId, reward } }),
    onError: (error) => {
      // the session was deleted elsewhere
      if (error instanceof ApiError && error.status === 404) void conversation.show(null).then(() => { goTo({ session: null, ...CHAT }); setAddress(addressed()); });
    },
  }), [sessions]);
  useStore(conversation);
  useStore(sessions);

  const openSession = useCallback(async (id: string | null) => {
    setDrawer(false);
    setTrouble("");
    goTo({ session: id, ...CHAT });
    setAddress(addressed());
    try {
      await conversation.show(id);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404 && id !== null) return openSession(null);
      report(error);
    }
    composer.current?.focus();
  }, [conversation, report]);

  const start = useCallback(async () => {
    setTrouble("");
    try {
      await sessions.refresh();
    } catch (error) {
      report(error);
      if (error instanceof ApiError && error.temporary) setTimeout(() => void start(), 2_000);
      return;
    }
    // whoever came for the other place stays there, and what was asked meanwhile stays in sight
    const now = addressed();
    const { session } = now;
    if (isChat(now) && (session !== null || !conversation.turns.length)) await openSession(session);
  }, [sessions, conversation, report, openSession]);

  useEffect(() => void start(), [start]);
  // A layout effect ends before the key is removed; a later effect might not.
  useLayoutEffect(() => () => { conversation.close(); sessions.close(); }, [conversation, sessions]);

  useEffect(() => {
    const stop = new AbortController();
    const { signal } = stop;
    void (async () => {
      while (!signal.aborted) {
        if (!document.hidden) setReady(await readiness());
        await sleep(READINESS_INTERVAL, signal);
      }
    })();
    void (async () => {
      while (!signal.aborted) {
        await sleep(LIST_INTERVAL, signal);
        if (!document.hidden && !signal.aborted) await sessions.refresh().catch(() => {});
      }
    })();
    const other = (event: MessageEvent<{ session: string | null; vote?: { queryId: string; reward: Reward | null } }>) => {
      const { vote } = event.data;
      if (vote) return conversation.voted(vote.queryId, vote.reward, false);
      sessions.refresh().catch(() => {});
      if (event.data.session === conversation.sessionId) conversation.sync(false).catch(() => {});
    };
    const seen = () => {
      if (document.hidden) return;
      conversation.sync(false).catch(() => {});
      conversation.judgedMeanwhile().catch(() => {});
    };
    const moved = () => {
      const now = addressed();
      setAddress(now);
      if (isChat(now) && now.session !== conversation.sessionId) void openSession(now.session);
    };
    tabs?.addEventListener("message", other);
    document.addEventListener("visibilitychange", seen, { signal });
    addEventListener("hashchange", moved, { signal });
    addEventListener("popstate", moved, { signal });
    return () => { stop.abort(); tabs?.removeEventListener("message", other); };
  }, [conversation, sessions, openSession]);

  useEffect(() => keep("developer", developer), [developer]);
  useEffect(() => {
    const shown = address.files ? "Files" : address.operate ? PLACES[placeOf(address.operate).place] : conversation.title;
    document.title = shown ? `${shown} · LoCAL2` : "LoCAL2";
  });

  const stopAll = useCallback(() => {
    for (const turn of [...conversation.open].reverse()) void conversation.cancel(turn).catch(report);
  }, [conversation, report]);

  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const command = event.ctrlKey || event.metaKey;
      if (command && event.key.toLowerCase() === "k") {
        event.preventDefault();
        setPalette(true);
      } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
        event.preventDefault();
        void openSession(null);
      } else if (event.key === "Escape" && !event.defaultPrevented && !event.isComposing) {
        // a dialog or a menu that is open has taken it before
        if (document.querySelector("[role=dialog], [role=menu]")) return;
        if (drawer) setDrawer(false);
        else if (conversation.open.length) stopAll();
      }
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, [conversation, drawer, openSession, stopAll]);

  const exported = useCallback((session: Session, form: "markdown" | "json") => {
    everyTurn(session.session_id).then((turns) => {
      if (form === "json") save(`${fileName(session.title)}.json`, asJson(session, turns), "application/json");
      else save(`${fileName(session.title)}.md`, asMarkdown(session.title, turns), "text/markdown");
    }).catch(report);
  }, [report]);

  const remove = useCallback((session: Session) => {
    sessions.delete(session);
    if (session.session_id === conversation.sessionId) void openSession(null);
  }, [sessions, conversation, openSession]);

  const go = (place: Partial<Address>) => { goTo({ session: conversation.sessionId, ...CHAT, ...place }); setAddress(addressed()); setDrawer(false); };
  const operate = (page: string) => go({ operate: page });
  const current = sessions.sessions.find((one) => one.session_id === conversation.sessionId);
  const rename = () => {
    const title = current && prompt("New title", current.title)?.trim();
    if (current && title) sessions.change(current, { title }).catch(report);
  };
  const choices: Choice[] = [
    { name: "New chat", act: () => void openSession(null) },
    { name: "Search conversations", act: () => { setDrawer(true); document.getElementById("search")?.focus(); } },
    ...(conversation.open.length ? [{ name: "Stop", act: stopAll }] : []),
    ...(current ? [
      { name: current.pinned ? "Unpin this chat" : "Pin this chat", act: () => void sessions.change(current, { pinned: !current.pinned }).catch(report) },
      { name: "Rename this chat", act: rename },
      { name: "Save this chat as Markdown", act: () => exported(current, "markdown") },
      { name: "Save this chat as JSON", act: () => exported(current, "json") },
      { name: "Delete this chat", act: () => remove(current) },
    ] : []),
    { name: "What is remembered about me", act: () => setAbout(true) },
    { name: "Files", act: () => go({ files: true }) },
    ...Object.entries(PLACES).map(([page, name]) => ({ name: `Operate: ${name.toLowerCase()}`, act: () => operate(page) })),
    ...THEMES.map((one) => ({ name: `Colours: ${one === "auto" ? "as the system" : one}`, act: () => onTheme(one) })),
    { name: developer ? "Hide state names and bus words" : "Show state names and bus words", act: () => setDeveloper(!developer) },
    ...(onSignOut ? [{ name: "Sign out", act: onSignOut }] : []),
    ...sessions.sessions.slice(0, 100).map((session) => ({ name: `Open: ${session.title}`, act: () => void openSession(session.session_id) })),
  ];
  const known = choices.filter((choice, at) => choices.findIndex((one) => one.name === choice.name) === at);

  return (
    <FileViewer onError={report}>
    <div className={drawer ? "page drawer-open" : "page"}>
      <a className="skip" href="#question" onClick={(event) => { event.preventDefault(); composer.current?.focus(); }}>To the question field</a>
      <header className="top">
        {isChat(address) && <IconButton icon="menu" label="Conversations" className="drawer-button" aria-expanded={drawer} onClick={() => setDrawer(!drawer)} />}
        <div className="places" role="group" aria-label="Places">
          <button type="button" aria-pressed={isChat(address)} onClick={() => go({})}>Chat</button>
          <button type="button" aria-pressed={address.files} onClick={() => go({ files: true })}>Files</button>
          <button type="button" aria-pressed={address.operate !== null} onClick={() => operate("participants")}>Operate</button>
        </div>
        <span className="title" dir="auto">{!isChat(address) ? "" : conversation.title || conversation.turns[0]?.turn.query}</span>
        <ReadyBadge ready={ready} />
        <IconButton icon="memory" label="What is remembered about me" onClick={() => setAbout(true)} />
        <IconButton icon="search" label="Commands (Ctrl+K)" onClick={() => setPalette(true)} />
        <Menu label="Settings" icon="more" choices={[
          { name: `Colours: ${theme === "auto" ? "as the system" : theme}`, icon: "tune", act: () => onTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!) },
          { name: developer ? "Hide state names and bus words" : "Show state names and bus words", icon: "tool", act: () => setDeveloper(!developer) },
          ...(onSignOut ? [{ name: "Sign out", icon: "key" as const, act: onSignOut }] : []),
        ]} />
      </header>
      {trouble && <p className="alert" role="alert">{trouble} <IconButton icon="close" label="Close" onClick={() => setTrouble("")} /></p>}
      <div className="body">
        {address.files ? (
          <Suspense fallback={<p className="dim">…</p>}><Files onError={report} /></Suspense>
        ) : address.operate ? (
          <Suspense fallback={<p className="dim">…</p>}><Operate page={address.operate} onPage={operate} /></Suspense>
        ) : (
          <>
            <Sidebar list={sessions} current={conversation.sessionId} onOpen={(id) => void openSession(id)} onExport={exported} onDelete={remove} onError={report} />
            <Chat conversation={conversation} ready={ready} developer={developer} composer={composer} onError={report} />
          </>
        )}
      </div>
      <Undo list={sessions} />
      <Dialog open={about} onClose={() => setAbout(false)} title="What is remembered about me" wide><Suspense fallback={<p className="dim">…</p>}><About /></Suspense></Dialog>
      <Palette open={palette} onClose={() => setPalette(false)} choices={known} />
    </div>
    </FileViewer>
  );
}

function ReadyBadge({ ready }: { ready: Readiness | null }) {
  if (!ready) return <span className="ready" role="status"><Icon name="again" /> connecting …</span>;
  const troubles = Object.entries(ready.parts).filter(([, part]) => !part.ok).map(([name, part]) => `${name}: ${part.reason}`);
  const model = ready.parts["model"];
  const fine = ready.status === "ready";
  const facts = model?.facts ?? {};
  const abilities = Array.isArray(facts["abilities"]) ? `can: ${facts["abilities"].join(", ")}` : "";
  const note = model?.note;
  const told = [facts["server"], facts["window"] && `window ${counted(Number(facts["window"]), "token")}`, facts["slots"] && `${String(facts["slots"])} at a time`, abilities, note].filter(Boolean).join("; ");
  return (
    <span className={fine ? (model?.demo || note ? "ready fair" : "ready good") : "ready poor"} role="status" title={fine ? told || undefined : troubles.join("\n")}>
      <span className="dot" aria-hidden="true" /> <span className="ready-text">{fine ? `${model?.demo ? "demonstration model " : ""}${model?.model ?? "ready"}` : troubles[0] || ready.status}</span>
    </span>
  );
}
