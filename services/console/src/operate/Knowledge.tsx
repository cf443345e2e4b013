// Facts as a table and as a picture; each can be corrected and forgotten.

import { Suspense, lazy, useCallback, useEffect, useState } from "react";
import { call } from "../api/http";
import type { Fact } from "../api/types";
import { FactForm } from "../places/FactForm";
import { Dialog, IconButton } from "../ui/parts";
import { useAsked, useWork, type Shapes } from "./asking";
import { Confirm, Grid, Json, Note, Refresh, State, Waiting, When, type Column, type Question } from "./parts";

const Picture = lazy(() => import("./Picture"));
const PAGE = 200;

const COLUMNS: Column<Fact>[] = [
  { name: "Subject", value: (one) => one.subject.name, cell: (one) => <span dir="auto">{one.subject.name}</span> },
  { name: "Relation", value: (one) => one.relation, cell: (one) => <i dir="auto">{one.relation}</i> },
  { name: "Object", value: (one) => one.object.name, cell: (one) => <span dir="auto">{one.object.name}</span> },
  { name: "State", value: (one) => one.state, cell: (one) => <State fine={one.state === "is" ? "good" : one.state === "doubted" ? "fair" : ""}>{one.state === "is" ? "is" : one.state === "was" ? "was" : "doubted"}</State> },
  { name: "Since", value: (one) => one.since },
  { name: "Until", value: (one) => one.until },
  { name: "Confidence", number: true, value: (one) => one.confidence, cell: (one) => one.confidence.toFixed(2) },
  { name: "Said", value: (one) => one.time, cell: (one) => <When ms={one.time} /> },
];

export default function Knowledge() {
  const [facts, setFacts] = useState<Fact[] | null>(null);
  const [cursor, setCursor] = useState<string | null>(null);
  const [about, setAbout] = useState("");
  const [editing, edit] = useState<Fact | null>(null);
  const [question, ask] = useState<Question | null>(null);
  const [said, run] = useWork();
  const graph = useAsked<Shapes["KnowledgeGraph"]>(`knowledge/graph?limit=200&about=${encodeURIComponent(about)}`);
  const load = useCallback((after: string | null) => run(async () => {
    const page = await call<Shapes["FactPage"]>("GET", `knowledge/facts?limit=${PAGE}&about=${encodeURIComponent(about)}${after ? `&cursor=${encodeURIComponent(after)}` : ""}`);
    setFacts((known) => (after && known ? [...known, ...page.facts] : page.facts));
    setCursor(page.cursor);
  }), [run, about]);
  useEffect(() => void load(null), [load]);
  const renew = () => { void load(null); graph.refresh(); };
  const path = (fact: Fact) => `knowledge/facts/${encodeURIComponent(fact.id)}`;
  return (
    <section>
      <h2>Knowledge</h2>
      <p className="dim">What follows from your conversations, and what you said yourself. {about && <>Only about <b dir="auto">{about}</b>. <button type="button" className="link" onClick={() => setAbout("")}>Show all</button></>}</p>
      <Note>{said || graph.wrong}</Note>
      {!facts && !said && <Waiting />}
      {graph.found && graph.found.nodes.length > 0 && <Suspense fallback={<p className="dim">…</p>}><Picture graph={graph.found} onAbout={setAbout} /></Suspense>}
      {facts && (
        <Grid name="Facts" rows={facts} keyOf={(one) => one.id} columns={COLUMNS} empty="No facts are known yet. They come from what is said in Chat, and from “What is remembered about me”." rowClass={(one) => (one.state === "is" ? "" : "absent")}
          detail={(one) => <><ul>{one.why.map((words, at) => <li key={at} dir="auto">{words}</li>)}</ul><Json value={one} /></>}
          actions={(one) => (
            <>
              <IconButton icon="edit" label={`Correct: ${one.text}`} onClick={() => edit(one)} />
              <IconButton icon="trash" label={`Forget: ${one.text}`} onClick={() => ask({
                title: "Forget this fact?", words: one.text, yes: "Forget it",
                act: () => void run(async () => { await call("DELETE", path(one)); renew(); return "Forgotten."; }),
              })} />
            </>
          )}>
          <Refresh onClick={renew} />
        </Grid>
      )}
      {cursor && <button type="button" className="tool" onClick={() => void load(cursor)}>Older ones</button>}
      <Dialog open={editing !== null} onClose={() => edit(null)} title="Correct a fact">
        {editing && <FactForm fact={editing} onDone={(change) => {
          edit(null);
          if (change) void run(async () => { await call("PATCH", path(editing), change); renew(); return "Corrected."; });
        }} />}
      </Dialog>
      <Confirm question={question} onClose={() => ask(null)} />
    </section>
  );
}
