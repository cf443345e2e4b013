// Who is there and how busy they are; and a page of each, with what it does and how it is set.

import * as Ariakit from "@ariakit/react";
import { age } from "../ui/parts";
import { Activity } from "./Activity";
import { usePolled, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Grid, Json, Note, State, Waiting, sum, type Column } from "./parts";
import { Settings } from "./Settings";

type Participant = Shapes["Participant"];
type Replica = Shapes["ReplicaShown"];

const waiting = ({ work }: Participant) => (work?.length ? sum(work, (one) => one.backlog) : null);
const states = ({ replicas }: Participant) => [...new Set(replicas.map((one) => one.state))].join(", ") || "no live replica";

export default function Participants({ rest, onGo }: PageProps) {
  const { found, wrong } = usePolled<Shapes["ParticipantList"]>("participants");
  const [name, part = "activity"] = rest;
  if (name) return <One name={name} part={part} participant={found?.participants.find((one) => one.name === name)} wrong={wrong} onGo={onGo} />;
  const columns: Column<Participant>[] = [
    { name: "Name", value: (one) => one.name, cell: (one) => <button type="button" className="link" onClick={() => onGo(`participants/${one.name}`)}>{one.name}</button> },
    { name: "State", value: states, cell: (one) => <State fine={one.replicas.length === 0 ? "poor" : one.replicas.every((replica) => replica.state === "ready") ? "good" : "fair"}>{states(one)}</State> },
    { name: "Replicas", number: true, value: (one) => one.replicas.length },
    { name: "Load", number: true, value: (one) => sum(one.replicas, (replica) => replica.in_flight), cell: (one) => <Load replicas={one.replicas} /> },
    { name: "Waiting", number: true, value: waiting },
    { name: "Handled", number: true, value: (one) => sum(one.replicas, (replica) => replica.handled) },
    { name: "Version", value: (one) => [...new Set(one.replicas.map((replica) => replica.release).filter((release) => release !== undefined))].join(", ") },
    { name: "Started", number: true, value: (one) => Math.min(...one.replicas.map((replica) => replica.started ?? Infinity)), cell: (one) => { const started = Math.min(...one.replicas.map((replica) => replica.started ?? Infinity)); return Number.isFinite(started) ? age((Date.now() - started) / 1000) : "–"; } },
  ];
  return (
    <section>
      <h2>Participants</h2>
      <Note>{wrong}</Note>
      {!found && !wrong && <Waiting />}
      {found && <Grid name="Participants" id="participants-table" rows={found.participants} keyOf={(one) => one.name} columns={columns} rowClass={(one) => (one.replicas.length ? "" : "absent")} empty="No participant is alive." />}
    </section>
  );
}

function Load({ replicas }: { replicas: Replica[] }) {
  const most = sum(replicas, (one) => one.concurrency);
  if (!most) return <>–</>;
  // what a replica holds beyond its places it has read, and works at next
  const busy = sum(replicas, (one) => Math.min(one.in_flight ?? 0, one.concurrency ?? 0));
  const next = sum(replicas, (one) => one.in_flight) - busy;
  return <span className="load" title={`${busy} at work, ${most} at most${next ? `; ${next} more will be next` : ""}`}><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect className="ground" width="100" height="10" /><rect className="value" width={Math.min(100, (100 * busy) / most)} height="10" /></svg> <span>{busy}/{most}{next > 0 && ` +${next}`}</span></span>;
}

function One({ name, part, participant, wrong, onGo }: { name: string; part: string; participant: Participant | undefined; wrong: string; onGo(page: string): void }) {
  const columns: Column<Replica>[] = [
    { name: "Replica", value: (one) => one.replica },
    { name: "State", value: (one) => one.state, cell: (one) => <State fine={one.state === "ready" ? "good" : "fair"}>{one.state}</State> },
    { name: "Load", number: true, value: (one) => one.in_flight, cell: (one) => <Load replicas={[one]} /> },
    { name: "Handled", number: true, value: (one) => one.handled },
    { name: "Version", number: true, value: (one) => one.release },
    { name: "Started", number: true, value: (one) => one.started, cell: (one) => (one.started ? age((Date.now() - one.started) / 1000) : "–") },
    { name: "Last seen", number: true, value: (one) => one.age_ms, cell: (one) => (one.age_ms === undefined ? "–" : age(one.age_ms / 1000)) },
  ];
  return (
    <section>
      <p className="crumbs"><button type="button" className="link" onClick={() => onGo("participants")}>Participants</button> / {name}</p>
      <h2>{name}</h2>
      <Note>{wrong}</Note>
      {participant && (
        <>
          <Grid name={`Replicas of ${name}`} rows={participant.replicas} keyOf={(one) => one.replica ?? one.state} columns={columns} searched={false} empty="No replica is alive: what is sent to it waits. Start it, or see its log for why it ended."
            detail={(one) => <><p className="dim">{one.tools?.length ? `Tools: ${one.tools.join(", ")}` : "It offers no tools."}</p><Facts facts={one.facts ?? {}} /></>} />
          {participant.work && participant.work.length > 0 && (
            <p className="dim">{participant.work.map((one) => `${one.subject}: ${one.backlog ?? "?"} waiting, ${one.pending} in work`).join(" · ")}</p>
          )}
        </>
      )}
      <Ariakit.TabProvider selectedId={`part-${part}`} setSelectedId={(id) => { if (id) onGo(`participants/${name}/${id.replace("part-", "")}`); }} selectOnMove={false}>
        <Ariakit.TabList className="tabs" aria-label={name}>
          <Ariakit.Tab className="tab" id="part-activity">Activity</Ariakit.Tab>
          <Ariakit.Tab className="tab" id="part-settings">Settings</Ariakit.Tab>
        </Ariakit.TabList>
        <Ariakit.TabPanel tabId="part-activity" unmountOnHide><Activity participant={name} onGo={onGo} /></Ariakit.TabPanel>
        <Ariakit.TabPanel tabId="part-settings" unmountOnHide><Settings participant={name} /></Ariakit.TabPanel>
      </Ariakit.TabProvider>
    </section>
  );
}

/** What a replica says of itself: plain values as a list, the rest as JSON. */
export function Facts({ facts }: { facts: Record<string, unknown> }) {
  const said = (value: unknown) => (typeof value === "number" && value >= 10_000 ? value.toLocaleString("en") : Array.isArray(value) ? value.join(", ") : String(value));
  const simple = (value: unknown) => value !== null && typeof value !== "object";
  const plain = Object.entries(facts).filter(([, value]) => simple(value) || (Array.isArray(value) && value.length > 0 && value.every(simple)));
  return (
    <>
      {plain.length > 0 && <dl className="facts">{plain.map(([name, value]) => <div key={name} className="fact-row"><dt>{name.replaceAll("_", " ")}</dt><dd dir="auto">{said(value)}</dd></div>)}</dl>}
      {Object.keys(facts).length > plain.length && <Json value={facts} />}
    </>
  );
}
