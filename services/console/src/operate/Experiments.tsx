// Another configuration on trial with respondent B: how it does, and what becomes of it.

import { useState } from "react";
import { call } from "../api/http";
import { Dialog } from "../ui/parts";
import { useAsked, useRespondentB, useWork, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Confirm, Grid, Json, Note, Refresh, State, Waiting, When, percent, type Column, type Question } from "./parts";

type Summary = Shapes["ExperimentSummary"];
type Experiment = Shapes["Experiment"];
type Result = Shapes["TrialResult"];

const POLL = 5_000;
const DECISIONS = { better: "B is better", worse: "B is worse", "not yet": "not known yet" } as const;

export default function Experiments({ rest, onGo }: PageProps) {
  const { found, wrong, refresh } = useAsked<Shapes["ExperimentList"]>("experiments", POLL);
  const second = useRespondentB();
  const [making, make] = useState(false);
  const [said, run] = useWork();
  const name = rest[0];
  if (name) return <One name={name} onGo={onGo} />;
  const columns: Column<Summary>[] = [
    { name: "Name", value: (one) => one.name, cell: (one) => <button type="button" className="link" onClick={() => onGo(`experiments/${one.name}`)}>{one.name}</button> },
    { name: "State", value: (one) => one.state, cell: (one) => <State fine={one.state === "running" || one.state === "promoted" ? "good" : ""}>{one.state}</State> },
    { name: "Changed", value: (one) => one.changed.join(", ") },
    { name: "Model of B", value: (one) => one.b.model },
    { name: "Started", value: (one) => one.started, cell: (one) => <When ms={one.started} /> },
    { name: "Ended", value: (one) => one.ended, cell: (one) => (one.ended ? <When ms={one.ended} /> : "–") },
  ];
  return (
    <section>
      <h2>Experiments</h2>
      <p className="dim">B answers the same questions with another model, prompt or temperature; the judge compares. One runs at a time.</p>
      <Note>{wrong || said}</Note>
      {!found && !wrong && <Waiting />}
      {found && (
        <Grid name="Experiments" rows={found.experiments} keyOf={(one) => `${one.name} ${one.started}`} columns={columns} empty={`There has been none yet.${second === false ? " An experiment needs a respondent B: local2 run --respondent-b." : ""}`}>
          <button type="button" className="primary" onClick={() => make(true)}>New experiment</button>
          <Refresh onClick={refresh} />
        </Grid>
      )}
      <Dialog open={making} onClose={() => make(false)} title="New experiment">
        <form className="form" onSubmit={(event) => {
          event.preventDefault();
          const values = new FormData(event.currentTarget);
          const word = (field: string) => String(values.get(field) ?? "").trim();
          const b = { ...(word("model") && { model: word("model") }), ...(word("prompt") && { prompt: word("prompt") }), ...(word("temperature") && { temperature: Number(word("temperature")) }) };
          make(false);
          void run(async () => { const made = await call<Experiment>("POST", "experiments", { name: word("name"), b }); onGo(`experiments/${made.name}`); });
        }}>
          <label htmlFor="trial-name">Name</label><input id="trial-name" name="name" required maxLength={64} pattern="[A-Za-z0-9._\-]+" title="Letters, digits, dots, dashes and underscores" autoFocus autoComplete="off" />
          <p className="dim">What is to be different; what is left empty is as with A.</p>
          <label htmlFor="trial-model">Model</label><input id="trial-model" name="model" autoComplete="off" />
          <label htmlFor="trial-temperature">Temperature</label><input id="trial-temperature" name="temperature" type="number" min="0" max="2" step="any" />
          <label htmlFor="trial-prompt">System prompt</label><textarea id="trial-prompt" name="prompt" rows={4} dir="auto" />
          <div className="actions"><button type="button" className="quiet" onClick={() => make(false)}>Cancel</button><button type="submit" className="primary">Start</button></div>
        </form>
      </Dialog>
    </section>
  );
}

function One({ name, onGo }: { name: string; onGo(page: string): void }) {
  const path = `experiments/${encodeURIComponent(name)}`;
  const { found, wrong, refresh } = useAsked<Experiment>(path, POLL);
  const [question, ask] = useState<Question | null>(null);
  const [said, run] = useWork();
  const act = (verb: string, body?: unknown) => void run(async () => { await call("POST", `${path}/${verb}`, body); refresh(); });
  const better = found?.result.decision === "better";
  return (
    <section>
      <p className="crumbs"><button type="button" className="link" onClick={() => onGo("experiments")}>Experiments</button> / {name}</p>
      <h2>{name}</h2>
      <Note>{wrong || said}</Note>
      {found && (
        <>
          <div className="grid-tools">
            <State fine={found.state === "running" || found.state === "promoted" ? "good" : ""}>{found.state}</State>
            {found.state === "running" && <button type="button" className="tool" onClick={() => ask({ title: `Stop “${name}”?`, words: "B gets its former settings back; what was found stays.", yes: "Stop it", act: () => act("stop") })}>Stop</button>}
            {(found.state === "running" || found.state === "stopped") && <button type="button" className={better ? "primary" : "tool"} onClick={() => ask({
              title: `Promote “${name}”?`, yes: better ? "Promote it" : "Promote it all the same",
              words: better ? "A gets B's configuration, now and for later starts. It can be reverted." : "B is not known to be better. A gets its configuration all the same; it can be reverted.",
              act: () => act("promote", { force: !better }),
            })}>Promote</button>}
            {found.state === "promoted" && <button type="button" className="tool" onClick={() => ask({ title: `Revert “${name}”?`, words: "A gets the settings back that it had before.", yes: "Revert it", act: () => act("revert") })}>Revert</button>}
          </div>
          {found.warnings.length > 0 && <ul className="warnings">{found.warnings.map((one) => <li key={one} dir="auto">{one}</li>)}</ul>}
          <ResultTable results={[["All turns", found.result], ...Object.entries(found.intents)]} />
          <h3>What is compared</h3>
          <div className="two">
            {(["a", "b"] as const).map((side) => (
              <div key={side} className="card">
                <h4>{side.toUpperCase()}</h4>
                <p>{found[side].model}{found[side].temperature === null ? "" : `, temperature ${found[side].temperature}`}</p>
                <p className="dim wrapped answer" dir="auto" tabIndex={0}>{found[side].prompt}</p>
              </div>
            ))}
          </div>
          <p className="dim">People's votes for A: {found.votes.a.positive} good, {found.votes.a.negative} bad.{found.votes.promoted && ` Since the promotion: ${found.votes.promoted.positive} good, ${found.votes.promoted.negative} bad.`}</p>
          <Json value={found} />
        </>
      )}
      <Confirm question={question} onClose={() => ask(null)} />
    </section>
  );
}

function ResultTable({ results }: { results: [string, Result][] }) {
  return (
    <div className="table" role="region" aria-label="Results" tabIndex={0}>
      <table className="grid">
        <thead><tr><th scope="col">Turns</th><th scope="col">Decision</th><th scope="col">B's share of wins</th><th scope="col" className="number">Won</th><th scope="col" className="number">Tied</th><th scope="col" className="number">Lost</th><th scope="col" className="number">Conversations</th><th scope="col" className="number">More needed</th></tr></thead>
        <tbody>
          {results.map(([name, one]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td><State fine={one.decision === "better" ? "good" : one.decision === "worse" ? "poor" : ""}>{DECISIONS[one.decision]}</State></td>
              <td>{one.share === null ? "–" : <>{percent(one.share)} [{percent(one.low)} to {percent(one.high)}]</>}</td>
              <td className="number">{one.wins}</td><td className="number">{one.ties}</td><td className="number">{one.losses}</td>
              <td className="number">{one.conversations}</td><td className="number">{one.more ?? "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
