// What happened before an answer, in its order: thinking, words before a call, tools, the committee.

import { useState, type ReactNode } from "react";
import type { Call } from "../api/types";
import { Prose } from "../markdown/Prose";
import { Icon, type IconName } from "../ui/icons";
import { colourOf, duration } from "../ui/parts";
import { hits, type Persona, type Step, type Thinking } from "./turn";
import { counted } from "../words";

interface Now {
  /** Nothing more will come. */
  over: boolean;
  /** The answer itself has begun. */
  answering: boolean;
}

export function Steps({ steps, over, answering }: Now & { steps: readonly Step[] }) {
  return steps.map((part, at) => {
    const live = at === steps.length - 1 && !over && !answering;
    switch (part.kind) {
      case "thinking":
        return <ThinkingView key={at} part={part} live={live} />;
      case "said":
        return <div key={at} className="said"><Prose text={part.text} over /></div>;
      case "note":
        return <p key={at} className="note">{part.text}</p>;
      case "tool":
        return <ToolView key={part.call.call_id ?? at} call={part.call} over={over} />;
      case "persona":
        return <PersonaView key={`${part.persona} ${part.round}`} part={part} over={over} />;
    }
  });
}

/** Open while something happens in it; afterwards as the user left it. */
function Fold({ className, live, summary, children }: { className: string; live: boolean; summary: ReactNode; children: ReactNode }) {
  const [chosen, choose] = useState<boolean | null>(null);
  const open = chosen ?? live;
  return (
    <details className={className} open={open}>
      <summary onClick={(event) => { event.preventDefault(); choose(!open); }}>{summary}</summary>
      {open && <div className="fold">{children}</div>}
    </details>
  );
}

function ThinkingView({ part, live }: { part: Thinking; live: boolean }) {
  return (
    <Fold className="step thinking" live={live} summary={live ? "Thinking …" : "Thought"}>
      <p className="plain" dir="auto">{part.text}</p>
    </Fold>
  );
}

function PersonaView({ part, over }: { part: Persona; over: boolean }) {
  const finished = part.done || over;
  return (
    <Fold className="step persona" live={!finished} summary={<><Icon name="people" /> {part.persona} <span className="dim">· round {part.round}{finished ? "" : " …"}</span></>}>
      <Steps steps={part.steps} over={finished} answering={part.text !== ""} />
      <Prose text={part.text} over={finished} />
    </Fold>
  );
}

const ICONS: Record<string, IconName> = {
  web_search: "search", web_fetch: "page", search_memory: "memory", save_memory: "memory", save_topic: "memory", recall_topic: "memory",
  search_knowledge_graph: "graph", search_documents: "page",
};
const NAMES: Record<string, string> = {
  web_search: "Searched the web", web_fetch: "Read a page", search_memory: "Looked into the memory", save_memory: "Remembered",
  save_topic: "Remembered", recall_topic: "Recalled", search_knowledge_graph: "Looked up what is known", search_documents: "Searched your documents",
  current_time: "Looked at the clock",
};

function ToolView({ call, over }: { call: Call; over: boolean }) {
  const answered = call.result !== null && call.result !== undefined;
  const took = call.duration_ms === undefined ? "" : duration(call.duration_ms);
  const status = call.error ? `error ${took}` : answered ? took || "done" : over ? "no result" : "running …";
  return (
    <Fold
      className={call.error ? "step tool failed" : "step tool"}
      live={false}
      summary={<><Icon name={ICONS[call.tool] ?? "tool"} /> <b>{NAMES[call.tool] ?? call.tool}</b> <span className="args">{brief(call.args)}</span> <span className="dim">· {status}</span></>}
    >
      <Card call={call} />
    </Fold>
  );
}

/** What a call brought, in the form that its kind has. */
function Card({ call }: { call: Call }) {
  const found = hits(call);
  if (call.error) return <p className="error-text">{call.error}</p>;
  if (found.length && call.tool === "web_search") return <ul className="hits">{found.map((hit, at) => <PageHit key={at} hit={hit} />)}</ul>;
  if (found.length && call.tool === "search_memory") return <ul className="hits">{found.map((hit, at) => <MemoryHit key={at} hit={hit} />)}</ul>;
  if (found.length && call.tool === "search_knowledge_graph") return <ul className="hits">{found.map((hit, at) => <FactHit key={at} hit={hit} />)}</ul>;
  return (
    <>
      {call.tool === "web_fetch" && <p><SafeLink address={text(call.args["url"])}>{text(call.args["url"])}</SafeLink></p>}
      <details><summary>Arguments</summary><pre tabIndex={0}>{JSON.stringify(call.args, null, 2)}</pre></details>
      <pre tabIndex={0} className="result">{call.result || "…"}</pre>
    </>
  );
}

const text = (value: unknown): string => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value));
const figure = (value: unknown): string => (typeof value === "number" ? value.toFixed(2) : "");

/** A link that leads to a page of the web, or the words alone. */
export function SafeLink({ address, children }: { address: string; children: ReactNode }) {
  return /^https?:\/\//i.test(address) ? <a href={address} target="_blank" rel="noopener noreferrer">{children}</a> : <>{children}</>;
}

export function host(address: string): string {
  try {
    return new URL(address).hostname;
  } catch {
    return "";
  }
}

function PageHit({ hit }: { hit: Record<string, unknown> }) {
  const address = text(hit["url"]);
  return (
    <li>
      <Icon name="globe" /> <SafeLink address={address}>{text(hit["title"]) || address}</SafeLink> <span className="dim">{host(address)}</span>
      <p dir="auto">{text(hit["snippet"])}</p>
    </li>
  );
}

function MemoryHit({ hit }: { hit: Record<string, unknown> }) {
  const why = (hit["why"] ?? {}) as Record<string, unknown>;
  const seconds = typeof hit["age_seconds"] === "number" ? hit["age_seconds"] : null;
  const known = [
    `relevance ${figure(hit["relevance"])}`,
    typeof why["similarity"] === "number" && `similarity ${figure(why["similarity"])}`,
    seconds !== null && `${counted(Math.floor(seconds / 86_400), "day")} old`,
    hit["sentiment"] && `voted ${text(hit["sentiment"])}`,
    text(hit["mark"]).toLowerCase(),
  ].filter(Boolean);
  return (
    <li>
      <b dir="auto">{text(hit["query"]) || text(hit["topic"])}</b> {colourOf(hit["score"]) && <span className={`badge ${colourOf(hit["score"])}`}>{text(hit["score"])}/5</span>}
      <p dir="auto">{text(hit["answer"]) || text(hit["content"])}</p>
      <p className="dim">{known.join(" · ")}</p>
      <details className="dim"><summary>Why</summary><ul>{Object.entries(why).map(([name, value]) => <li key={name}>{name.replaceAll("_", " ")}: {figure(value) || text(value)}</li>)}</ul></details>
    </li>
  );
}

function FactHit({ hit }: { hit: Record<string, unknown> }) {
  const state = text(hit["state"]);
  return (
    <li>
      <span className={`fact-state ${state}`}>{state === "was" ? "WAS" : state === "is" ? "IS" : state.toUpperCase()}</span> {text(hit["text"])}
    </li>
  );
}

function brief(args: Record<string, unknown>): string {
  const values = Object.values(args ?? {});
  const words = values.length === 1 && typeof values[0] === "string" ? values[0] : JSON.stringify(args ?? {});
  return words.length > 80 ? `${words.slice(0, 80)}…` : words;
}
