// What the judge said: its grades and comparisons, with the answers that they are about.

import { useMemo } from "react";
import { colourOf } from "../ui/parts";
import { useAsked, useTail, type BusEntry, type Shapes } from "./asking";
import { answersOf, verdictsOf, type Answer, type Verdict } from "./verdicts";
import type { PageProps } from "./Operate";
import { Grid, Json, Note, State, When, type Column } from "./parts";
import { beginning } from "./summary";

const SUBJECTS = ["response.generation", "critique.result", "pairwise.result"];

const said = (one: Verdict) => (one.kind === "grade" ? (one.score === null ? "no grade" : `${one.score}/5`) : one.winner === "tie" ? "tie" : `${one.winner} is better`);

export default function Critic({ onGo }: PageProps) {
  const { entries, said: trouble } = useTail(SUBJECTS, 1_000);
  const answers = useMemo(() => answersOf(entries), [entries]);
  const verdicts = useMemo(() => verdictsOf(entries), [entries]);
  const columns: Column<Verdict>[] = [
    { name: "When", value: (one) => one.time, cell: (one) => <When ms={one.time} /> },
    { name: "Kind", value: (one) => one.kind },
    { name: "Respondent", value: (one) => one.respondent },
    { name: "Verdict", value: said, cell: (one) => <State fine={one.kind === "grade" ? colourOf(one.score) : ""}>{said(one)}</State> },
    { name: "Rubric", value: (one) => one.rubric },
    { name: "Query", wide: true, value: (one) => answers.get(`${one.question}:A`)?.query ?? answers.get(`${one.question}:B`)?.query, cell: (one) => beginning(answers.get(`${one.question}:A`)?.query ?? answers.get(`${one.question}:B`)?.query ?? one.question, 100) },
  ];
  return (
    <>
      <section>
        <h2>Critic</h2>
        <p className="dim">The newest verdicts, as they come. <button type="button" className="link" onClick={() => onGo("participants/critic/settings")}>The judge's settings</button> · <button type="button" className="link" onClick={() => onGo("ranking")}>whether it can be trusted</button></p>
        <Note>{trouble}</Note>
        <Grid name="Verdicts" rows={verdicts} keyOf={(one) => one.id} columns={columns} empty="No verdict has come yet. The judge grades answers when the model server is at rest."
          detail={(one) => <Detail verdict={one} a={answers.get(`${one.question}:A`)} b={answers.get(`${one.question}:B`)} onGo={onGo} />} />
      </section>
      <Rubrics />
    </>
  );
}

function Detail({ verdict, a, b, onGo }: { verdict: Verdict; a: Answer | undefined; b: Answer | undefined; onGo(page: string): void }) {
  return (
    <>
      <p className="wrapped" dir="auto">{verdict.words}</p>
      <div className="two">
        <One name="A" answer={a} score={verdict.scoreA} /><One name="B" answer={b} score={verdict.scoreB} />
      </div>
      <button type="button" className="tool" onClick={() => onGo(`bus/${verdict.question}`)}>Waterfall of this question</button>
      <Json value={verdict.entry as BusEntry} />
    </>
  );
}

function One({ name, answer, score }: { name: string; answer: Answer | undefined; score: number | null }) {
  return (
    <div className="card">
      <h4>{name}{answer?.model ? ` · ${answer.model}` : ""} {score !== null && <State fine={colourOf(Math.round(score))}>{score}/5</State>}</h4>
      <p className="wrapped answer" dir="auto" tabIndex={0}>{answer ? answer.text || "(no answer)" : "Not among the newest answers, or there is none."}</p>
    </div>
  );
}

/** Which rubric is used for which tools, as the critic's settings say. */
function Rubrics() {
  const { found, wrong } = useAsked<Shapes["SettingsShown"]>("participants/critic/settings");
  const rubrics = Object.entries((found?.values["rubrics"] ?? {}) as Record<string, unknown>);
  const byRubric = new Map<string, string[]>();
  for (const [tool, rubric] of rubrics) byRubric.set(String(rubric), [...(byRubric.get(String(rubric)) ?? []), tool]);
  return (
    <section>
      <h2>Rubrics</h2>
      <Note>{wrong}</Note>
      {found && (
        <dl className="facts">
          <div className="fact-row"><dt>realistic</dt><dd>all other answers: whether it is true, to the point and complete</dd></div>
          {[...byRubric].map(([rubric, tools]) => <div key={rubric} className="fact-row"><dt>{rubric}</dt><dd>answers with {tools.join(", ")}</dd></div>)}
        </dl>
      )}
    </section>
  );
}
