// What is remembered about the user: facts, topics and conversations, each of which can be corrected or forgotten.

import { useCallback, useEffect, useState, type ReactNode } from "react";
import * as Ariakit from "@ariakit/react";
import { ApiError, call } from "../api/http";
import type { Engram, Fact, Topic, WholeEngram } from "../api/types";
import { IconButton, age, colourOf, verdictOf } from "../ui/parts";
import { Icon } from "../ui/icons";
import { FactForm } from "./FactForm";

const PAGE = 30;

export default function About() {
  return (
    <Ariakit.TabProvider>
      <Ariakit.TabList className="tabs" aria-label="What is remembered">
        <Ariakit.Tab className="tab" id="facts">Facts</Ariakit.Tab>
        <Ariakit.Tab className="tab" id="topics">Notes</Ariakit.Tab>
        <Ariakit.Tab className="tab" id="engrams">Conversations</Ariakit.Tab>
      </Ariakit.TabList>
      <Ariakit.TabPanel tabId="facts" className="panel-body" unmountOnHide><Facts /></Ariakit.TabPanel>
      <Ariakit.TabPanel tabId="topics" className="panel-body" unmountOnHide><Topics /></Ariakit.TabPanel>
      <Ariakit.TabPanel tabId="engrams" className="panel-body" unmountOnHide><Engrams /></Ariakit.TabPanel>
    </Ariakit.TabProvider>
  );
}

/** Work whose failure is said where it was asked for. */
function useSaid(): [string, (work: () => Promise<unknown>) => Promise<void>] {
  const [said, say] = useState("");
  const run = useCallback(async (work: () => Promise<unknown>) => {
    try {
      const words = await work();
      say(typeof words === "string" ? words : "");
    } catch (error) {
      say(error instanceof ApiError && error.status === 404 ? "This part of the stack does not run here." : error instanceof Error ? error.message : String(error));
    }
  }, []);
  return [said, run];
}

const Note = ({ children }: { children: ReactNode }) => <p className="dim" role="status">{children}</p>;

function Facts() {
  const [facts, setFacts] = useState<Fact[]>([]);
  const [editing, edit] = useState("");
  const [said, run] = useSaid();
  const load = useCallback(() => run(async () => {
    const found = await call<{ facts: Fact[] }>("GET", `knowledge/facts?limit=${PAGE * 3}`);
    setFacts(found.facts);
    return found.facts.length ? "" : "No facts about you are known yet. Tell the assistant where you live or who your friends are.";
  }), [run]);
  useEffect(() => void load(), [load]);
  return (
    <>
      <Note>{said}</Note>
      <ul className="cards">
        {facts.map((fact) => (
          <li key={fact.id} className="card">
            {editing === fact.id ? (
              <FactForm fact={fact} onDone={(change) => {
                edit("");
                if (change) void run(async () => { await call("PATCH", `knowledge/facts/${encodeURIComponent(fact.id)}`, change); await load(); });
              }} />
            ) : (
              <>
                <p dir="auto"><span className={`fact-state ${fact.state}`}>{fact.state === "was" ? "WAS" : fact.state === "is" ? "IS" : "DOUBTED"}</span> {fact.subject.name} <i>{fact.relation}</i> {fact.object.name}</p>
                <details className="dim"><summary>Why</summary><ul>{fact.why.map((one, at) => <li key={at} dir="auto">{one}</li>)}</ul></details>
                <div className="card-actions">
                  <IconButton icon="edit" label={`Correct: ${fact.text}`} onClick={() => edit(fact.id)} />
                  <IconButton icon="trash" label={`Forget: ${fact.text}`} onClick={() => void run(async () => {
                    await call("DELETE", `knowledge/facts/${encodeURIComponent(fact.id)}`);
                    setFacts((known) => known.filter((one) => one.id !== fact.id));
                    return "Forgotten.";
                  })} />
                </div>
              </>
            )}
          </li>
        ))}
      </ul>
    </>
  );
}

function Topics() {
  const [topics, setTopics] = useState<Topic[]>([]);
  const [editing, edit] = useState("");
  const [said, run] = useSaid();
  const load = useCallback(() => run(async () => {
    const found = await call<{ topics: Topic[] }>("GET", "memory/topics");
    setTopics(found.topics);
    return found.topics.length ? "" : 'Nothing is noted yet. Say "please remember …".';
  }), [run]);
  useEffect(() => void load(), [load]);
  const path = (topic: string) => `memory/topics/${encodeURIComponent(topic)}`;
  return (
    <>
      <Note>{said}</Note>
      <ul className="cards">
        {topics.map(({ topic, content }) => (
          <li key={topic} className="card">
            <p className="dim">{topic}</p>
            {editing === topic ? (
              <form className="form" onSubmit={(event) => {
                event.preventDefault();
                const words = String(new FormData(event.currentTarget).get("content") ?? "").trim();
                edit("");
                if (words && words !== content) void run(async () => { await call("PUT", path(topic), { content: words }); await load(); });
              }}>
                <textarea name="content" aria-label={topic} defaultValue={content} rows={3} maxLength={20000} dir="auto" autoFocus />
                <div className="actions"><button type="button" className="quiet" onClick={() => edit("")}>Cancel</button><button type="submit" className="primary">Keep</button></div>
              </form>
            ) : <p dir="auto">{content}</p>}
            <div className="card-actions">
              <IconButton icon="edit" label={`Change ${topic}`} onClick={() => edit(topic)} />
              <IconButton icon="trash" label={`Forget ${topic}`} onClick={() => void run(async () => {
                await call("DELETE", path(topic));
                setTopics((known) => known.filter((one) => one.topic !== topic));
                return "Forgotten.";
              })} />
            </div>
          </li>
        ))}
      </ul>
    </>
  );
}

/** What the second respondent answered nobody has read: it stands in the critic's log, not in what is known of a person. */
const wasSaid = (one: Engram) => one.respondent_id !== "B";

function Engrams() {
  const [engrams, setEngrams] = useState<Engram[]>([]);
  const [cursor, setCursor] = useState<string | null>(null);
  const [words, setWords] = useState("");
  const [said, run] = useSaid();
  const load = useCallback((after: string | null) => run(async () => {
    const page = await call<{ engrams: Engram[]; cursor: string | null; total: number }>("GET", `memory/engrams?limit=${PAGE}${after ? `&cursor=${encodeURIComponent(after)}` : ""}`);
    const own = page.engrams.filter(wasSaid);
    setEngrams((known) => (after ? [...known, ...own] : own));
    setCursor(page.cursor);
    return page.total ? "" : "Nothing is remembered yet.";
  }), [run]);
  useEffect(() => void load(null), [load]);
  const search = () => words.trim() ? run(async () => {
    const { hits, degraded } = await call<{ hits: Engram[]; degraded: string | null }>("GET", `memory?limit=${PAGE}&query=${encodeURIComponent(words.trim())}`);
    const own = hits.filter(wasSaid);
    setEngrams(own);
    setCursor(null);
    return degraded ?? (own.length ? "" : "Nothing fits.");
  }) : load(null);
  return (
    <>
      <form role="search" className="row" onSubmit={(event) => { event.preventDefault(); void search(); }}>
        <label htmlFor="memory-query" className="hidden-text">Search the memory</label>
        <input id="memory-query" type="search" maxLength={4000} placeholder="Search as the assistant does" autoComplete="off" value={words} onChange={(event) => setWords(event.target.value)} />
        <button type="submit">Search</button>
      </form>
      <Note>{said}</Note>
      <ul className="cards" id="engram-list">
        {engrams.map((engram) => (
          <EngramCard key={engram.id} engram={engram} onForget={() => run(async () => {
            await call("DELETE", `memory/engrams/${encodeURIComponent(engram.id)}`);
            setEngrams((known) => known.filter((one) => one.id !== engram.id));
            return "Forgotten.";
          })} />
        ))}
      </ul>
      {cursor && <button type="button" className="quiet" onClick={() => void load(cursor)}>Older</button>}
    </>
  );
}

function EngramCard({ engram, onForget }: { engram: Engram; onForget(): Promise<void> }) {
  const [whole, setWhole] = useState<WholeEngram | null>(null);
  const title = engram.kind === "turn" ? engram.query : (engram.topic ?? engram.content ?? engram.query);
  const colour = colourOf(engram.score);
  const judged = (whole?.annotations ?? {}) as Record<string, { critique?: string; reason?: string }>;
  return (
    <li className="card">
      <details onToggle={(event) => {
        if (event.currentTarget.open && !whole) call<WholeEngram>("GET", `memory/engrams/${encodeURIComponent(engram.id)}`).then(setWhole, () => {});
      }}>
        <summary dir="auto">{title}</summary>
        <p className="plain" dir="auto">{whole?.answer || whole?.content || engram.answer || engram.content}</p>
        {judged["critique"]?.critique && <p className="dim">critic: {judged["critique"].critique}</p>}
        {judged["pairwise"]?.reason && <p className="dim">compared: {judged["pairwise"].reason}</p>}
      </details>
      <p className="known">
        {colour && <span className={`badge ${colour}`} title="Critic's score">{engram.score}/5</span>}
        {engram.winner && <span className="badge verdict">{verdictOf(engram.winner, engram.respondent_id ?? "A")}</span>}
        {engram.sentiment && <span role="img" aria-label={engram.sentiment === "positive" ? "Voted good" : "Voted bad"}><Icon name={engram.sentiment === "positive" ? "up" : "down"} /></span>}
        {engram.tainted && <span className="badge verdict" title="It holds text from the web">from the web</span>}
        <span className="dim">{age(engram.age_seconds)}</span>
        <span className="spring" />
        <IconButton icon="trash" label={`Forget: ${title}`} onClick={() => void onForget()} />
      </p>
    </li>
  );
}
