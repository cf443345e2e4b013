// What is well and what is not, part by part, with what to do.

import { useEffect, useState } from "react";
import { readiness } from "../api/http";
import { sleep } from "../api/events";
import type { Readiness } from "../api/types";
import { usePolled, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Note, State, Waiting, sum } from "./parts";
import { Facts } from "./Participants";
import { advice, warningsOf } from "./advice";
import { counted } from "../words";

const INTERVAL = 5_000;
const NAMES: Record<string, string> = { gateway: "Gateway", bus: "Bus (Redis)", model: "Model", generator: "Generator", memory: "Memory", tools: "Tools" };

// in the order in which one needs the other
const place = (name: string) => (Object.keys(NAMES).indexOf(name) + 1) || Infinity;

export default function Health({ onGo }: PageProps) {
  const [ready, setReady] = useState<Readiness | null>(null);
  const { found, wrong } = usePolled<Shapes["ParticipantList"]>("participants");
  useEffect(() => {
    const stop = new AbortController();
    void (async () => {
      while (!stop.signal.aborted) {
        const answer = await readiness();
        if (!stop.signal.aborted) setReady(answer);
        await sleep(INTERVAL, stop.signal);
      }
    })();
    return () => stop.abort();
  }, []);
  if (!ready) return <section><h2>Health</h2><Waiting /></section>;
  const warnings = found ? warningsOf(found.participants) : [];
  const waiting = found ? sum(found.participants, (one) => sum(one.work ?? [], (work) => work.backlog)) : 0;
  return (
    <section>
      <h2>Health</h2>
      <p><State fine={ready.status === "ready" ? "good" : "poor"}>{ready.status === "ready" ? "Questions are answered" : "Questions are not answered now"}</State></p>
      <ul className="health">
        {Object.entries(ready.parts).sort(([a], [b]) => place(a) - place(b)).map(([name, part]) => (
          <li key={name} className="card">
            <p className="health-head"><b>{NAMES[name] ?? name}</b> <State fine={part.ok ? (part.note || part.demo ? "fair" : "good") : "poor"}>{part.ok ? (part.demo ? "demonstration" : "well") : "not well"}</State></p>
            {part.model && <p>{part.model}{part.backend ? ` at ${part.backend}` : ""}</p>}
            {part.replicas !== undefined && <p className="dim">{counted(part.replicas, "replica")}</p>}
            {part.reason && <p className="error-text" dir="auto">{part.reason}</p>}
            {part.note && <p className="fair-text" dir="auto">{part.note}</p>}
            {part.missing && part.missing.length > 0 && <p>Missing: {part.missing.join(", ")}</p>}
            {advice(name, part) && <p>{advice(name, part)}</p>}
            {part.facts && <Facts facts={part.facts} />}
          </li>
        ))}
      </ul>
      <h3>What participants say</h3>
      <Note>{wrong}</Note>
      {found && warnings.length === 0 && <p className="dim">Nothing is amiss. {waiting ? `${counted(waiting, "message")} not read yet.` : "No work waits."}</p>}
      {warnings.length > 0 && <ul className="health">
        {warnings.map(({ participant, words, todo }) => (
          <li key={`${participant} ${words}`} className="card">
            <p><button type="button" className="link" onClick={() => onGo(`participants/${participant}`)}>{participant}</button></p>
            <p dir="auto">{words}</p>
            {todo && <p className="dim">{todo}</p>}
          </li>
        ))}
      </ul>}
      <p className="dim">The same, and what stands on this machine beside it, is said by <code>local2 doctor</code>.</p>
    </section>
  );
}
