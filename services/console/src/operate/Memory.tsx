// What is remembered, as a table; and what a search finds, with the reasons for its order.

import { useCallback, useEffect, useState } from "react";
import { call } from "../api/http";
import type { Engram, Hit, WholeEngram } from "../api/types";
import { IconButton, age, colourOf, verdictOf } from "../ui/parts";
import { useAsked, useWork, type Shapes } from "./asking";
import { Confirm, Grid, Json, Note, Refresh, State, Waiting, type Column, type Question } from "./parts";
import { reasonsOf, signed } from "./ranking";
import { beginning } from "./summary";

const PAGE = 200;

const title = (one: Engram) => (one.kind === "turn" ? one.query : (one.topic ?? one.content ?? one.query));
const COLUMNS: Column<Engram>[] = [
  { name: "Age", number: true, value: (one) => one.age_seconds, cell: (one) => age(one.age_seconds) },
  { name: "Respondent", value: (one) => one.respondent_id },
  { name: "Score", number: true, value: (one) => one.score, cell: (one) => (one.score === null ? "–" : <State fine={colourOf(one.score)}>{one.score}/5</State>) },
  { name: "Sentiment", value: (one) => one.sentiment, cell: (one) => (one.sentiment ? <State fine={one.sentiment === "positive" ? "good" : "poor"}>{one.sentiment}</State> : "–") },
  { name: "Winner", value: (one) => one.winner, cell: (one) => (one.winner ? verdictOf(one.winner, one.respondent_id ?? "A") : "–") },
  { name: "Query", wide: true, value: title, cell: (one) => <span>{beginning(title(one))}</span> },
];

export default function Memory() {
  const [engrams, setEngrams] = useState<Engram[] | null>(null);
  const [cursor, setCursor] = useState<string | null>(null);
  const [total, setTotal] = useState(0);
  const [question, ask] = useState<Question | null>(null);
  const [said, run] = useWork();
  const load = useCallback((after: string | null) => run(async () => {
    const page = await call<Shapes["EngramPage"]>("GET", `memory/engrams?limit=${PAGE}${after ? `&cursor=${encodeURIComponent(after)}` : ""}`);
    setEngrams((known) => (after && known ? [...known, ...page.engrams] : page.engrams));
    setCursor(page.cursor);
    setTotal(page.total);
  }), [run]);
  useEffect(() => void load(null), [load]);
  const forget = (one: Engram) => ask({
    title: "Forget this?", words: `“${beginning(title(one), 100)}” is removed for good, with what was concluded from it alone.`, yes: "Forget it",
    act: () => void run(async () => {
      await call("DELETE", `memory/engrams/${encodeURIComponent(one.id)}`);
      setEngrams((known) => known?.filter((other) => other.id !== one.id) ?? null);
      setTotal((before) => before - 1);
      return "Forgotten.";
    }),
  });
  return (
    <>
      <section>
        <h2>Memory</h2>
        <p className="dim">Your own: what other users said is theirs, also for administrators.</p>
        <Note>{said}</Note>
        {!engrams && !said && <Waiting />}
        {engrams && (
          <Grid name="Memory" rows={engrams} keyOf={(one) => one.id} columns={COLUMNS} empty="Nothing is remembered yet. Each finished answer is, soon after it was given." detail={(one) => <Whole id={one.id} />}
            actions={(one) => <IconButton icon="trash" label={`Forget: ${beginning(title(one), 60)}`} onClick={() => forget(one)} />}>
            <Refresh onClick={() => void load(null)} />
          </Grid>
        )}
        {cursor && <button type="button" className="tool" onClick={() => void load(cursor)}>Older ones ({Math.max(0, total - (engrams?.length ?? 0))} more)</button>}
      </section>
      <Search />
      <Confirm question={question} onClose={() => ask(null)} />
    </>
  );
}

function Whole({ id }: { id: string }) {
  const { found, wrong } = useAsked<WholeEngram>(`memory/engrams/${encodeURIComponent(id)}`);
  const judged = (found?.annotations ?? {}) as Record<string, { critique?: unknown; reason?: unknown }>;
  return (
    <>
      <Note>{wrong}</Note>
      {found && (
        <>
          {found.query && <p dir="auto" className="wrapped"><b>{found.query}</b></p>}
          <p dir="auto" className="wrapped">{found.answer || found.content}</p>
          {typeof judged["critique"]?.critique === "string" && <p className="dim wrapped" dir="auto">Judge: {judged["critique"].critique}</p>}
          {typeof judged["pairwise"]?.reason === "string" && <p className="dim wrapped" dir="auto">Comparison: {judged["pairwise"].reason}</p>}
          <p className="dim">{[found.model, found.intent, found.entities.join(", "), found.tainted ? "holds text from the web" : ""].filter(Boolean).join(" · ")}</p>
          <Json value={found} />
        </>
      )}
    </>
  );
}

const HIT_COLUMNS: Column<Hit>[] = [
  { name: "Query", wide: true, value: title, cell: (one) => <span dir="auto">{beginning(title(one))}</span> },
  { name: "Relevance", number: true, value: (one) => one.relevance, cell: (one) => one.relevance.toFixed(2) },
  { name: "Mark", value: (one) => one.mark },
  { name: "Age", number: true, value: (one) => one.age_seconds, cell: (one) => age(one.age_seconds) },
  { name: "Score", number: true, value: (one) => one.score, cell: (one) => (one.score === null ? "–" : `${one.score}/5`) },
];

function Search() {
  const [words, setWords] = useState("");
  const [asked, askFor] = useState<string | null>(null);
  const { found, wrong } = useAsked<Shapes["HitList"]>(asked && `memory?limit=20&query=${encodeURIComponent(asked)}`);
  return (
    <section>
      <h2>What the model would find</h2>
      <form role="search" className="row search-row" onSubmit={(event) => { event.preventDefault(); askFor(words.trim() || null); }}>
        <label htmlFor="ranked-query" className="hidden-text">Question</label>
        <input id="ranked-query" type="search" maxLength={4000} placeholder="A question, as somebody would ask it" autoComplete="off" value={words} onChange={(event) => setWords(event.target.value)} />
        <button type="submit" className="primary">Search</button>
      </form>
      <Note>{wrong || found?.degraded}</Note>
      {asked && found && (
        <>
          <Grid name="Hits" rows={found.hits} keyOf={(one) => one.id} columns={HIT_COLUMNS} searched={false} empty="Nothing fits: the model would get no memories." detail={(one) => <Why hit={one} />} />
          {found.text && <details><summary>What the model reads</summary><pre className="json wrapped" tabIndex={0} dir="auto">{found.text}</pre></details>}
        </>
      )}
    </section>
  );
}

function Why({ hit }: { hit: Hit }) {
  return (
    <>
      <p className="wrapped" dir="auto">{hit.answer || hit.content}</p>
      <ul className="reasons">
        {reasonsOf(hit.why).map(({ words, value }) => <li key={words}>{value !== null && <b>{signed(value)}</b>} {words}</li>)}
      </ul>
      <Json value={hit} />
    </>
  );
}
