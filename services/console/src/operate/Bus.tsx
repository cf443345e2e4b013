// The bus as it runs: its messages by what they are about, one question's waterfall, and the streams they stand in.

import { useId, useMemo, useState } from "react";
import { Dialog, age, duration } from "../ui/parts";
import { Entries, StateSwitch } from "./Activity";
import { useAsked, useTail, usePolled, type BusEntry, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Grid, Json, Note, Waiting, sum, type Column } from "./parts";
import { fits, isState, participantOf, respondentOf, spansOf, summaryOf, withLog, type Wanted } from "./summary";
import { counted } from "../words";

const SHOWN = 200;
const EVERYTHING: readonly string[] = [];
const NOTHING: Wanted = { subject: "", session: "", question: "", participant: "" };
type Stream = Shapes["Stream"];

export default function Bus({ rest, onGo }: PageProps) {
  const { entries, said, there } = useTail(EVERYTHING, 1_000);
  const [states, showStates] = useState(false);
  const [wanted, setWanted] = useState<Wanted>(NOTHING);
  const [held, hold] = useState<readonly BusEntry[] | null>(null);
  const fitting = useMemo(() => (held ?? entries).filter((entry) => fits(entry, wanted)), [held, entries, wanted]);
  const shown = useMemo(() => (states ? fitting : fitting.filter((entry) => !isState(entry))), [fitting, states]);
  const participants = useMemo(() => [...new Set(entries.map(participantOf))].filter(Boolean).sort(), [entries]);
  const subjects = useMemo(() => [...new Set(entries.map((entry) => entry.subject))].sort(), [entries]);
  const ids = useId();
  const set = (name: keyof Wanted) => (event: { target: { value: string } }) => setWanted((before) => ({ ...before, [name]: event.target.value.trim() }));
  const question = rest[0] ?? null;
  return (
    <>
      <section>
        <h2>Messages</h2>
        <div className="filters">
          <label>Subject <input id="subject" list={`${ids}-subjects`} value={wanted.subject} placeholder="all" autoComplete="off" onChange={set("subject")} /></label>
          <datalist id={`${ids}-subjects`}>{subjects.map((one) => <option key={one} value={one} />)}</datalist>
          <label>Participant <select value={wanted.participant} onChange={set("participant")}><option value="">all</option>{participants.map((one) => <option key={one}>{one}</option>)}</select></label>
          <label>Session <input value={wanted.session} placeholder="id" autoComplete="off" onChange={set("session")} /></label>
          <label>Question <input value={wanted.question} placeholder="id" autoComplete="off" onChange={set("question")} /></label>
          <button type="button" className="tool" aria-pressed={held !== null} onClick={() => hold(held ? null : entries)}>{held ? "Go on" : "Hold"}</button>
          {Object.values(wanted).some(Boolean) && <button type="button" className="tool" onClick={() => setWanted(NOTHING)}>Show all</button>}
          <StateSwitch on={states} all={fitting} onChange={showStates} />
          <span className="dim" role="status">{shown.length > SHOWN ? `the newest ${SHOWN} of ${shown.length}` : counted(shown.length, "message")}</span>
        </div>
        <Note>{said}</Note>
        {shown.length ? <Entries id="bus-events" entries={shown.slice(0, SHOWN)} onQuestion={(id) => onGo(`bus/${id}`)} onOnly={(only) => setWanted({ ...NOTHING, ...only })} />
          : there ? <p className="dim">{entries.length ? "No message fits. What was handled by all its readers is removed from the bus soon." : "Nothing is published now. Ask something in Chat to see it pass."}</p> : !said && <Waiting />}
      </section>
      <Streams />
      <Waterfall entries={entries} question={question} onClose={() => onGo("bus")} />
    </>
  );
}

/** One question from its arrival to its judge: who worked on it when. */
function Waterfall({ entries, question, onClose }: { entries: readonly BusEntry[]; question: string | null; onClose(): void }) {
  // The tail has the newest messages only; the query's user also gets the older ones that are still on the bus.
  const { found, wrong } = useAsked<Shapes["QueryResult"]>(question && `queries/${encodeURIComponent(question)}?event_log=true`);
  const spans = useMemo(() => (question ? spansOf(withLog(entries, question, found?.event_log ?? []), question) : []), [entries, question, found]);
  const whole = Math.max(1, ...spans.map(({ start, length }) => start + length));
  return (
    <Dialog open={question !== null} onClose={onClose} title="One question, from its arrival to its judge" wide>
      <p className="dim"><code>{question}</code> · {counted(spans.length, "message")} in {duration(whole)}</p>
      {spans.length === 0 ? (found || wrong) && <p>None of its messages is on the bus any more: they are removed when all their readers have handled them.</p> : (
        <div className="table" role="region" aria-label="Messages of the question" tabIndex={0}>
          <table className="waterfall grid">
            <thead><tr><th scope="col">Who</th><th scope="col">Message</th><th scope="col" className="number">After</th><th scope="col">Time</th></tr></thead>
            <tbody>
              {spans.map(({ entry, start, length }) => (
                <tr key={`${entry.subject} ${entry.entry_id}`}>
                  <th scope="row">{participantOf(entry) || "–"}</th>
                  <td className="wide" dir="auto"><b>{entry.subject}</b>{respondentOf(entry) === "B" && <span className="badge">B</span>} {entry.payload === undefined ? <span className="dim">not among the newest messages</span> : <><span className="dim">{summaryOf(entry)}</span><Json value={entry} /></>}</td>
                  <td className="number">{duration(start)}</td>
                  <td className="bar-cell"><svg viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label={length ? `for ${duration(length)}` : "at once"}><rect x={(99 * start) / whole} y="0" width={Math.max(1, (99 * length) / whole)} height="4" /></svg></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Dialog>
  );
}

function Streams() {
  const { found, wrong } = usePolled<Shapes["StreamList"]>("bus/streams");
  const total = (stream: Stream, name: "lag" | "pending") => (stream.groups.length ? sum(stream.groups, (one) => one[name]) : null);
  const columns: Column<Stream>[] = [
    { name: "Subject", value: (one) => one.subject },
    { name: "Length", number: true, value: (one) => one.length },
    { name: "Lag", number: true, value: (one) => total(one, "lag") },
    { name: "Pending", number: true, value: (one) => total(one, "pending") },
    { name: "Oldest", number: true, value: (one) => one.oldest_seconds, cell: (one) => (one.oldest_seconds === null ? "–" : age(one.oldest_seconds)) },
    { name: "Readers", value: (one) => one.groups.map((group) => group.name).join(", ") },
  ];
  return (
    <section>
      <h2>Streams</h2>
      <Note>{wrong}</Note>
      {found && <Grid name="Streams" id="streams" rows={found.streams} keyOf={(one) => one.subject} columns={columns} order={{ column: "Length", descending: true }} empty="No stream has been made yet." />}
    </section>
  );
}
