import { useEffect, useRef, useState } from "react";
import type { Session } from "../api/types";
import { Icon } from "../ui/icons";
import { Menu } from "../ui/parts";
import { grouped, type SessionList } from "./sessions";
import { useStore } from "./store";

interface SidebarProps {
  list: SessionList;
  current: string | null;
  onOpen(id: string | null): void;
  onExport(session: Session, form: "markdown" | "json"): void;
  onDelete(session: Session): void;
  onError(error: unknown): void;
}

export function Sidebar({ list, current, onOpen, onExport, onDelete, onError }: SidebarProps) {
  useStore(list);
  const [renaming, rename] = useState("");
  const shown = list.sessions.filter((one) => one.session_id !== list.leaving?.session_id);
  const words = list.words.trim();
  const groups = words ? [{ name: shown.length ? "Found" : "Nothing found", sessions: shown }] : grouped(shown, Date.now());
  return (
    <nav className="sidebar" aria-label="Conversations">
      <button type="button" id="new-session" className="new" onClick={() => onOpen(null)}><Icon name="plus" /> New chat</button>
      <div className="search" role="search">
        <Icon name="search" />
        <label htmlFor="search" className="hidden-text">Search titles and messages</label>
        <input id="search" type="search" placeholder="Search" maxLength={200} autoComplete="off" value={list.words} onChange={(event) => list.search(event.target.value)} />
      </div>
      <div className="session-groups">
        {groups.map((group) => (
          <section key={group.name}>
            <h2>{group.name}</h2>
            <ul>
              {group.sessions.map((session) => (
                <li key={session.session_id} className={session.session_id === current ? "current" : ""}>
                  {renaming === session.session_id
                    ? <Rename session={session} onDone={(title) => {
                      rename("");
                      if (title && title !== session.title) list.change(session, { title }).catch(onError);
                    }} />
                    : <button type="button" className="session" data-session={session.session_id} aria-current={session.session_id === current ? "page" : undefined}
                      title={`${session.title}\n${new Date(session.updated).toLocaleString()}`} onClick={() => onOpen(session.session_id)}>
                      <span className="session-title" dir="auto">{session.title || session.session_id}</span>
                      {list.running.has(session.session_id) && <span className="pulse" role="img" aria-label="being answered" />}
                      {session.excerpt && <span className="excerpt" dir="auto">{session.excerpt}</span>}
                    </button>}
                  <Menu label={`What can be done with: ${session.title}`} icon="more" className="session-menu" choices={[
                    { name: "Rename", icon: "edit", act: () => rename(session.session_id) },
                    { name: session.pinned ? "Unpin" : "Pin", icon: "pin", act: () => list.change(session, { pinned: !session.pinned }).catch(onError) },
                    { name: "Save as Markdown", icon: "page", act: () => onExport(session, "markdown") },
                    { name: "Save as JSON", icon: "page", act: () => onExport(session, "json") },
                    { name: "Delete", icon: "trash", danger: true, act: () => onDelete(session) },
                  ]} />
                </li>
              ))}
            </ul>
          </section>
        ))}
        {words && !list.complete && <p className="dim">There may be more; more words find it.</p>}
        {list.more && <button type="button" className="quiet" onClick={() => list.showMore()}>Older conversations</button>}
      </div>
    </nav>
  );
}

function Rename({ session, onDone }: { session: Session; onDone(title: string): void }) {
  const field = useRef<HTMLInputElement>(null);
  const over = useRef(false);
  useEffect(() => {
    // the menu that was open gives the focus back first
    const frame = requestAnimationFrame(() => field.current?.select());
    return () => cancelAnimationFrame(frame);
  }, []);
  const done = (title: string) => {
    if (over.current) return;
    over.current = true;
    onDone(title);
  };
  return (
    <input ref={field} className="rename" aria-label="New title" defaultValue={session.title} maxLength={200} dir="auto"
      onKeyDown={(event) => {
        if (event.key === "Enter") done(event.currentTarget.value.trim());
        if (event.key === "Escape") { event.stopPropagation(); done(""); }
      }}
      onBlur={(event) => done(event.currentTarget.value.trim())} />
  );
}

export function Undo({ list }: { list: SessionList }) {
  useStore(list);
  if (!list.leaving) return null;
  return (
    <div className="toast" role="status">
      <span>Deleted: {list.leaving.title}</span>
      <button type="button" className="quiet" onClick={() => list.undo()}>Undo</button>
    </div>
  );
}
