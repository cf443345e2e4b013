// What operators look at: who is alive, what waits, what is published, who answers best.

import { useEffect, useRef, useState } from "react";
import * as Ariakit from "@ariakit/react";
import { follow, sleep } from "../api/events";
import { ApiError, call } from "../api/http";
import type { components } from "../api/schema";

type Shapes = components["schemas"];
const INTERVAL = 2_000;
const KEPT = 200;

export default function Operate({ page, onPage }: { page: string; onPage(page: string): void }) {
  return (
    <main className="operate">
      <Ariakit.TabProvider selectedId={page} setSelectedId={(id) => id && onPage(id)}>
        <Ariakit.TabList className="tabs" aria-label="Operate">
          <Ariakit.Tab className="tab" id="participants">Participants</Ariakit.Tab>
          <Ariakit.Tab className="tab" id="bus">Bus</Ariakit.Tab>
          <Ariakit.Tab className="tab" id="ranking">Ranking</Ariakit.Tab>
        </Ariakit.TabList>
        <Ariakit.TabPanel tabId="participants" className="panel-body" unmountOnHide><Participants /></Ariakit.TabPanel>
        <Ariakit.TabPanel tabId="bus" className="panel-body" unmountOnHide><Bus /></Ariakit.TabPanel>
        <Ariakit.TabPanel tabId="ranking" className="panel-body" unmountOnHide><Ranking /></Ariakit.TabPanel>
      </Ariakit.TabProvider>
    </main>
  );
}

function trouble(error: unknown): string {
  if (error instanceof ApiError && error.status === 403) return "This is shown to administrators.";
  return error instanceof Error ? error.message : String(error);
}

/** What a route says, again and again while the page is seen; and what is wrong. */
function usePolled<T>(path: string): [T | null, string] {
  const [found, setFound] = useState<T | null>(null);
  const [wrong, setWrong] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    void (async () => {
      while (!stop.signal.aborted) {
        if (!document.hidden) {
          try {
            const answer = await call<T>("GET", path);
            if (!stop.signal.aborted) { setFound(answer); setWrong(""); }
          } catch (error) {
            if (!stop.signal.aborted) setWrong(trouble(error));
            if (error instanceof ApiError && (error.status === 403 || error.status === 401)) return;
          }
        }
        await sleep(INTERVAL, stop.signal);
      }
    })();
    return () => stop.abort();
  }, [path]);
  return [found, wrong];
}

interface Replica { replica?: string; state: string; in_flight?: number; concurrency?: number; version?: string }
interface Participant { name: string; replicas: Replica[]; work?: { backlog?: number }[] }

const sum = <T,>(items: readonly T[], value: (item: T) => number | undefined) => items.reduce((total, item) => total + (value(item) ?? 0), 0);

function Participants() {
  const [found, wrong] = usePolled<{ participants: Participant[] }>("participants");
  return (
    <section>
      <h2>Participants</h2>
      {wrong && <p className="note" role="status">{wrong}</p>}
      <div className="table" role="region" aria-label="Participants" tabIndex={0}>
        <table id="participants-table">
          <thead><tr><th scope="col">Name</th><th scope="col">Replicas</th><th scope="col">In flight</th><th scope="col">Backlog</th><th scope="col">State</th></tr></thead>
          <tbody>
            {found?.participants.map(({ name, replicas, work }) => (
              <tr key={name} className={replicas.length ? "" : "absent"}>
                <th scope="row">{name}</th>
                <td className="number">{replicas.length}</td>
                <td className="number">{work ? `${sum(replicas, (one) => one.in_flight)}/${sum(replicas, (one) => one.concurrency)}` : "–"}</td>
                <td className="number">{work ? sum(work, (one) => one.backlog) : "–"}</td>
                <td>{replicas.map((one) => (one.replica ? `${one.replica}: ${one.state}` : one.state)).join(", ") || "no live replica"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Bus() {
  return <><Events /><Streams /></>;
}

interface Stream { subject: string; length: number; groups: { lag?: number | null; pending?: number | null }[] }

function Streams() {
  const [found, wrong] = usePolled<{ streams: Stream[] }>("bus/streams");
  const total = (groups: Stream["groups"], name: "lag" | "pending") => (groups.length ? String(sum(groups, (one) => one[name] ?? 0)) : "–");
  return (
    <section>
      <h2>Streams</h2>
      {wrong && <p className="note" role="status">{wrong}</p>}
      <div className="table" role="region" aria-label="Streams" tabIndex={0}>
        <table id="streams">
          <thead><tr><th scope="col">Subject</th><th scope="col">Length</th><th scope="col">Lag</th><th scope="col">Pending</th></tr></thead>
          <tbody>
            {found?.streams.map(({ subject, length, groups }) => (
              <tr key={subject}><th scope="row">{subject}</th><td className="number">{length}</td><td className="number">{total(groups, "lag")}</td><td className="number">{total(groups, "pending")}</td></tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

type BusEntry = Shapes["BusEntry"];

function Events() {
  const [events, setEvents] = useState<BusEntry[]>([]);
  const [said, say] = useState("");
  const [subject, filter] = useState("");
  const waiting = useRef<BusEntry[]>([]);
  useEffect(() => {
    const stop = new AbortController();
    let frame = 0;
    const show = () => {
      frame = 0;
      const fresh = waiting.current.splice(0);
      setEvents((known) => {
        const seen = new Set(known.map((one) => `${one.subject} ${one.entry_id}`));
        return [...fresh.filter((one) => !seen.has(`${one.subject} ${one.entry_id}`)).reverse(), ...known].slice(0, KEPT);
      });
    };
    follow("bus/events?last=20", {
      signal: stop.signal,
      onEvent: (_type, _id, data) => {
        waiting.current.push(data as BusEntry);
        frame ||= requestAnimationFrame(show);
      },
      onWaiting: (ms) => say(ms ? "Connection lost; trying again." : ""),
    }).catch((error: unknown) => say(trouble(error)));
    return () => { stop.abort(); cancelAnimationFrame(frame); };
  }, []);
  const shown = events.filter((one) => one.subject.includes(subject));
  return (
    <section>
      <h2>Messages</h2>
      <div className="row"><label htmlFor="subject">Subject</label><input id="subject" value={subject} placeholder="all" autoComplete="off" onChange={(event) => filter(event.target.value.trim())} /></div>
      {said && <p className="note" role="status">{said}</p>}
      <ol id="bus-events" className="events">
        {shown.map((event) => <EventRow key={`${event.subject} ${event.entry_id}`} event={event} />)}
      </ol>
    </section>
  );
}

function EventRow({ event }: { event: BusEntry }) {
  const [open, setOpen] = useState(false);
  const at = new Date(Number(event.time) || Number(event.entry_id.split("-")[0]));
  return (
    <li>
      <details onToggle={(toggled) => setOpen(toggled.currentTarget.open)}>
        <summary><time dateTime={at.toISOString()}>{at.toLocaleTimeString([], { hour12: false })}</time> <b>{event.subject}</b> <span className="dim">{event.source}</span></summary>
        {open && <pre tabIndex={0}>{JSON.stringify(event, null, 2)}</pre>}
      </details>
    </li>
  );
}

interface Row { name: string; win_rate: number; win_rate_low: number; win_rate_high: number; wins: number; ties: number; losses: number }
interface Board { rows: Row[]; note?: string | null; disagreement?: number | null; bias?: number | null; bias_low?: number | null; bias_high?: number | null }
interface Boards { judge: Board; people: Board }
type Leaderboard = Boards & { intents: Record<string, Boards>; agreement: { cases: number; share: number | null } };

const percent = (share: number) => `${Math.round(share * 100)} %`;

function Ranking() {
  const [board, setBoard] = useState<Leaderboard | null>(null);
  const [intent, setIntent] = useState("");
  const [said, say] = useState("");
  const [consent, setConsent] = useState<boolean | null>(null);
  const [consentSaid, sayConsent] = useState("");
  useEffect(() => {
    call<{ consent: boolean | null }>("GET", "preferences/consent").then(
      (found) => { setConsent(found.consent); sayConsent(found.consent === null ? "You have not said yet: that counts as no." : ""); },
      (error: unknown) => sayConsent(trouble(error)),
    );
    call<Leaderboard>("GET", "preferences/leaderboard").then(setBoard, (error: unknown) => say(trouble(error)));
  }, []);
  const shown = intent ? board?.intents[intent] : board;
  return (
    <>
      <section>
        <h2>Ranking</h2>
        {said && <p className="note" role="status">{said}</p>}
        {board && (
          <div className="row"><label htmlFor="ranking-intent">Kind of turns</label>
            <select id="ranking-intent" value={intent} onChange={(event) => setIntent(event.target.value)}>
              <option value="">All turns</option>
              {Object.keys(board.intents).map((name) => <option key={name}>{name}</option>)}
            </select>
          </div>
        )}
        {shown && <><Table title="By the judge" board={shown.judge} /><Bias board={shown.judge} /><Table title="By people" board={shown.people} /></>}
        {board && !intent && board.agreement.share !== null && <p className="dim">Judge and people agree on {percent(board.agreement.share)} of {board.agreement.cases} answers.</p>}
      </section>
      <section>
        <h2>Training</h2>
        <label className="check"><input id="consent" type="checkbox" checked={consent === true} onChange={(event) => {
          call<{ consent: boolean }>("PUT", "preferences/consent", { consent: event.target.checked }).then(
            (found) => { setConsent(found.consent); sayConsent("Kept."); },
            (error: unknown) => sayConsent(trouble(error)),
          );
        }} /> My conversations may be used for training</label>
        <p className="dim" role="status">{consentSaid}</p>
      </section>
    </>
  );
}

function Table({ title, board }: { title: string; board: Board }) {
  return (
    <>
      <h3>{title}</h3>
      {board.rows.length ? (
        <ol className="ranking">
          {board.rows.map((row) => (
            <li key={row.name}>
              <span className="name">{row.name}</span>
              <svg viewBox="0 0 100 8" preserveAspectRatio="none" className="bar" role="img" aria-label={`${percent(row.win_rate)}, between ${percent(row.win_rate_low)} and ${percent(row.win_rate_high)}`}>
                <rect className="ground" width="100" height="8" /><rect className="value" width={row.win_rate * 100} height="8" />
                <rect className="interval" x={row.win_rate_low * 100} y="3" width={Math.max(0, row.win_rate_high - row.win_rate_low) * 100} height="2" />
              </svg>
              <span className="dim">{percent(row.win_rate)} [{percent(row.win_rate_low)} to {percent(row.win_rate_high)}] · {row.wins} won, {row.ties} tied, {row.losses} lost</span>
            </li>
          ))}
        </ol>
      ) : <p>Nothing to rank yet.</p>}
      {board.rows.length > 0 && board.note && <p className="dim">{board.note}</p>}
    </>
  );
}

function Bias({ board }: { board: Board }) {
  const { disagreement, bias, bias_low: low, bias_high: high } = board;
  if (disagreement === null || disagreement === undefined) return null;
  const signed = (number: number) => (number < 0 ? "" : "+") + number.toFixed(2);
  const standing = bias === null || bias === undefined ? "" : ` Standing first is worth ${signed(bias)} [${signed(low ?? 0)}, ${signed(high ?? 0)}] log-odds.`;
  return <p className="dim">The two orders disagree in {percent(disagreement)}.{standing}</p>;
}
