// What the judge said: its grades and comparisons, with the answers that they are about.

import { useCallback, useEffect, useState } from "react";
import { call } from "../api/http";
import { colourOf } from "../ui/parts";
import { useAsked, useRespondentB, useTail, useWork, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Grid, Json, Note, Refresh, State, Waiting, When, type Column } from "./parts";
import { beginning } from "./summary";

type Verdict = Shapes["Verdict"];
type Answer = Shapes["JudgedAnswer"];

const SUBJECTS = ["critique.result", "pairwise.result"];
const PAGE = 100;
// ms until what was just said is kept
const KEPT_AFTER = 1_000;

const said = (one: Verdict) => (one.kind === "grade" ? (one.score === null ? "no grade" : `${one.score}/5`) : one.winner === "tie" ? "tie" : `${one.winner} is better`);

const voice = ({ score, winner }: Shapes["JudgeVoice"]) => (score !== null ? `${score}/5` : winner === "tie" ? "tie" : winner ? `${winner} is better` : "nothing");

/** Pages as one list, each verdict once, the newest first; what was read last is right. */
export function merged(known: readonly Verdict[], page: readonly Verdict[]): Verdict[] {
  const fresh = new Set(page.map((one) => one.id));
  return [...page, ...known.filter((one) => !fresh.has(one.id))].sort((a, b) => b.time - a.time);
}

export default function Critic({ onGo }: PageProps) {
  const [verdicts, setVerdicts] = useState<Verdict[] | null>(null);
  const [older, setOlder] = useState<string | null>(null);
  const [trouble, run] = useWork();
  const second = useRespondentB();
  const news = useTail(SUBJECTS, 0).entries[0]?.entry_id;
  const load = useCallback((after: string | null) => run(async () => {
    const page = await call<Shapes["VerdictPage"]>("GET", `preferences/verdicts?limit=${PAGE}${after ? `&cursor=${encodeURIComponent(after)}` : ""}`);
    setVerdicts((known) => merged(known ?? [], page.verdicts));
    setOlder((known) => (after || known === null ? page.cursor : known));
  }), [run]);
  useEffect(() => {
    const timer = setTimeout(() => void load(null), news === undefined ? 0 : KEPT_AFTER);
    return () => clearTimeout(timer);
  }, [load, news]);
  const columns: Column<Verdict>[] = [
    { name: "When", value: (one) => one.time, cell: (one) => <When ms={one.time} /> },
    { name: "Kind", value: (one) => one.kind },
    { name: "Respondent", value: (one) => one.respondent ?? "A and B" },
    { name: "Verdict", value: said, cell: (one) => <State fine={one.kind === "grade" ? colourOf(one.score) : ""}>{said(one)}</State> },
    { name: "Rubric", value: (one) => one.rubric },
    { name: "Query", wide: true, value: (one) => one.query, cell: (one) => (one.query === null ? <span className="dim">not kept any more</span> : beginning(one.query, 100)) },
  ];
  return (
    <>
      <section>
        <h2>Critic</h2>
        <p className="dim">What the judge said of all users' answers, as it comes. <button type="button" className="link" onClick={() => onGo("participants/critic/settings")}>The judge's settings</button> · <button type="button" className="link" onClick={() => onGo("ranking")}>whether it can be trusted</button></p>
        <Note>{trouble}</Note>
        {!verdicts && !trouble && <Waiting />}
        {verdicts && (
          <Grid name="Verdicts" rows={verdicts} keyOf={(one) => one.id} columns={columns} empty={`No verdict has come yet. The judge grades answers when the model server is at rest; it compares them where there is a respondent B${second === false ? " (local2 run --respondent-b)" : ""}.`}
            detail={(one) => <Detail verdict={one} onGo={onGo} />}>
            <Refresh onClick={() => void load(null)} />
          </Grid>
        )}
        {older && <button type="button" className="tool" onClick={() => void load(older)}>Older ones</button>}
      </section>
      <Rubrics />
    </>
  );
}

function Detail({ verdict, onGo }: { verdict: Verdict; onGo(page: string): void }) {
  const score = (name: string) => (verdict.kind === "comparison" ? (name === "A" ? verdict.score_a : verdict.score_b) : verdict.respondent === name ? verdict.score : null);
  const names = [...new Set(["A", ...(verdict.kind === "comparison" ? ["B"] : []), ...Object.keys(verdict.answers)])];
  return (
    <>
      {verdict.query && <p className="wrapped" dir="auto"><b>{verdict.query}</b></p>}
      <p className="wrapped" dir="auto">{verdict.words || "The judge gave no reasons."}</p>
      {verdict.judges.length > 0 && (
        <dl className="facts" aria-label="Each judge">
          {verdict.judges.map((one) => <div key={one.model} className="fact-row"><dt>{one.model}: {voice(one)}</dt><dd className="wrapped" dir="auto">{one.words}</dd></div>)}
        </dl>
      )}
      <div className="two">{names.map((name) => <One key={name} name={name} answer={verdict.answers[name]} score={score(name)} won={verdict.winner === name} />)}</div>
      <button type="button" className="tool" onClick={() => onGo(`bus/${verdict.query_id}`)}>Waterfall of this question</button>
      <Json value={verdict} />
    </>
  );
}

function One({ name, answer, score, won }: { name: string; answer: Answer | undefined; score: number | null; won: boolean }) {
  return (
    <div className="card">
      <h4>{name}{answer?.model ? ` · ${answer.model}` : ""} {score !== null && <State fine={colourOf(Math.round(score))}>{score}/5</State>} {won && <State fine="good">better</State>}</h4>
      <p className="wrapped answer" dir="auto" tabIndex={0}>{answer ? answer.answer || "(no answer)" : "This answer is not kept any more, or there is none."}</p>
    </div>
  );
}

interface Choice {
  enum?: string[];
  /** The wording of each. */
  enumDescriptions?: string[];
}

/** What the judge is asked to look at, and for which answers, as the critic's settings say. */
function Rubrics() {
  const { found, wrong } = useAsked<Shapes["SettingsShown"]>("participants/critic/settings");
  const chosen = Object.entries((found?.values["rubrics"] ?? {}) as Record<string, string>);
  const properties = (found?.schema["properties"] ?? {}) as Record<string, { additionalProperties?: Choice }>;
  const { enum: names = [], enumDescriptions: wording = [] } = properties["rubrics"]?.additionalProperties ?? {};
  const tools = (name: string) => chosen.filter(([, rubric]) => rubric === name).map(([tool]) => tool);
  return (
    <section>
      <h2>Rubrics</h2>
      <p className="dim">What the judge is told to look at. Which one is used for answers with which tools is one of its settings; own ones are files in the folder of <code>LOCAL2_CRITIC_RUBRICS_DIR</code>.</p>
      <Note>{wrong}</Note>
      {!found && !wrong && <Waiting />}
      <div className="rubrics">
        {names.map((name, at) => {
          const [question = "", ...scores] = (wording[at] ?? "").split("\n");
          return (
            <details key={name} className="card">
              <summary><b>{name}</b> <span className="dim">{tools(name).length ? `answers with ${tools(name).join(", ")}` : name === "realistic" ? "all other answers" : "no answers now"}</span></summary>
              <p dir="auto">{question.replace(/^\[|\]$/g, "")}</p>
              <ol>{scores.map((line) => <li key={line} dir="auto">{line.replace(/^Score \d: /, "")}</li>)}</ol>
            </details>
          );
        })}
      </div>
    </section>
  );
}
