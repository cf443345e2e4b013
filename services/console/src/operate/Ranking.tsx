// Who answers best, and how sure that is; whether the judge can be trusted; preferences as files for training.

import { useEffect, useState } from "react";
import { call, request } from "../api/http";
import { save } from "../chat/exporting";
import { trouble, useAsked, useRespondentB, useWork, type Shapes } from "./asking";
import { Note, Refresh, Waiting, percent } from "./parts";
import { axisOf, signed } from "./ranking";
import { counted } from "../words";

type Board = Shapes["Ranking"];
type Row = Shapes["RankedConfig"];

/** How many rows a file will have. */
const rowsOf = ({ rows, more }: Shapes["ExportCount"]) => `${counted(rows, "row")}${more ? " or more" : ""}`;

export default function Ranking() {
  const { found: board, wrong, refresh } = useAsked<Shapes["Leaderboard"]>("preferences/leaderboard");
  const second = useRespondentB();
  const [intent, setIntent] = useState("");
  const shown = intent ? board?.intents[intent] : board;
  return (
    <>
      <section>
        <h2>Leaderboard</h2>
        <Note>{wrong}</Note>
        {!board && !wrong && <Waiting />}
        {board && (
          <div className="grid-tools"><label htmlFor="ranking-intent">Kind of turns</label>
            <select id="ranking-intent" value={intent} onChange={(event) => setIntent(event.target.value)}>
              <option value="">All turns</option>
              {Object.keys(board.intents).map((name) => <option key={name}>{name}</option>)}
            </select>
            <Refresh onClick={refresh} />
          </div>
        )}
        {shown && <><Strengths title="By the judge" board={shown.judge} empty={`Nothing has been compared yet. Two configurations have to answer the same questions${second === false ? ": start a respondent B (local2 run --respondent-b)" : ""}.`} />
          <Strengths title="By people" board={shown.people} empty="There are too few votes yet: configurations are compared once answers of at least two of them were rated in Chat." /></>}
        {board && !intent && board.agreement.share !== null && <p className="dim">Judge and people agree on {percent(board.agreement.share)} of {counted(board.agreement.cases, "answer")}{board.agreement.kappa === null ? "" : ` (kappa ${board.agreement.kappa.toFixed(2)})`}.</p>}
      </section>
      <Judge />
      <Training />
    </>
  );
}

function Strengths({ title, board, empty }: { title: string; board: Board; empty: string }) {
  const groups = [...new Set(board.rows.map((row) => row.group))];
  const axis = axisOf(board.rows);
  return (
    <>
      <h3>{title}</h3>
      {board.rows.length === 0 && <p className="dim">{empty}</p>}
      {groups.map((group) => (
        <div key={group}>
          {groups.length > 1 && <p className="dim">Group {group}: not comparable with the other ones, for want of comparisons between them</p>}
          <ol className="ranking">
            {board.rows.filter((row) => row.group === group).map((row) => <Strength key={row.name} row={row} axis={axis} />)}
          </ol>
        </div>
      ))}
      {board.rows.length > 0 && (
        <p className="dim">Strength with its 95 % interval, in log-odds; 0 is the mean of a group. {counted(board.comparisons, "comparison")} in {counted(board.clusters, board.resampled)}. {board.note}</p>
      )}
      {board.disagreement !== null && <p className="dim">The two orders disagree in {percent(board.disagreement)}.{board.bias === null ? "" : ` Standing first is worth ${signed(board.bias)} [${signed(board.bias_low ?? 0)}, ${signed(board.bias_high ?? 0)}] log-odds.`}</p>}
    </>
  );
}

function Strength({ row, axis: { from, to } }: { row: Row; axis: { from: number; to: number } }) {
  const x = (value: number) => (100 * (value - from)) / (to - from);
  return (
    <li>
      <span className="name" dir="auto">{row.name}</span>
      <svg viewBox="0 0 100 10" preserveAspectRatio="none" className="strength" role="img" aria-label={`Strength ${signed(row.strength)}, between ${signed(row.low)} and ${signed(row.high)}`}>
        <rect className="ground" width="100" height="10" /><rect className="zero" x={x(0) - 0.1} width="0.2" height="10" />
        <rect className="interval" x={x(row.low)} y="4" width={Math.max(0.3, x(row.high) - x(row.low))} height="2" />
        <rect className="value" x={x(row.strength) - 0.5} y="1" width="1" height="8" />
      </svg>
      <span className="dim">{signed(row.strength)} [{signed(row.low)} to {signed(row.high)}] · wins {percent(row.win_rate)} [{percent(row.win_rate_low)} to {percent(row.win_rate_high)}] · {row.wins} won, {row.ties} tied, {row.losses} lost</span>
    </li>
  );
}

const MEASURED: [keyof Omit<Shapes["OneJudge"], "judge" | "warnings">, string, boolean][] = [
  ["agreement", "Agreement with people (kappa)", false],
  ["disagreement", "Other winner in the other order", true],
  ["first_wins", "The answer that stands first wins", true],
  ["length", "The longer answer wins", true],
  ["own_model", "The judge's own model wins", true],
  ["unread", "Judgements that could not be read", true],
];

function Judge() {
  const { found, wrong } = useAsked<Shapes["JudgeReport"]>("preferences/judge");
  return (
    <section>
      <h2>Can the judge be trusted?</h2>
      <Note>{wrong}</Note>
      {!found && !wrong && <Waiting />}
      {found && (
        <>
          <p className="dim">{found.judge ? `The judge is ${found.judge}.` : "There is no judge."}</p>
          <Figures name="The judge" of={found} />
          {found.judges.map((one) => <div key={one.judge}><h3>{one.judge} by itself</h3><Figures name={one.judge} of={one} /></div>)}
        </>
      )}
    </section>
  );
}

function Figures({ name, of }: { name: string; of: Omit<Shapes["OneJudge"], "judge"> }) {
  return (
    <>
      {of.warnings.length > 0 && <ul className="warnings">{of.warnings.map((one) => <li key={one} dir="auto">{one}</li>)}</ul>}
      <div className="table" role="region" aria-label={name} tabIndex={0}>
        <table className="grid">
          <thead><tr><th scope="col">What</th><th scope="col" className="number">Value</th><th scope="col" className="number">95 % interval</th><th scope="col" className="number">Cases</th></tr></thead>
          <tbody>
            {MEASURED.map(([what, words, share]) => {
              const { value, low, high, cases } = of[what];
              const said = (number: number) => (share ? percent(number) : number.toFixed(2));
              return <tr key={what}><th scope="row">{words}</th><td className="number">{value === null ? "not known yet" : said(value)}</td><td className="number">{low === null || high === null ? "–" : `${said(low)} to ${said(high)}`}</td><td className="number">{cases}</td></tr>;
            })}
          </tbody>
        </table>
      </div>
    </>
  );
}

const FORMATS = [["dpo", "Pairs (DPO)"], ["kto", "Single answers (KTO)"], ["critiques", "Grades with their words"]] as const;

function Training() {
  const [said, run] = useWork();
  const [consented, setConsented] = useState(false);
  const [human, setHuman] = useState(false);
  const [consent, setConsent] = useState<boolean | null>(null);
  const [consentSaid, sayConsent] = useState("");
  const filters = `consented=${consented}&human_only=${human}`;
  const { found: counts, wrong, refresh } = useAsked<Shapes["ExportCounts"]>(`preferences/export/counts?${filters}`);
  useEffect(() => {
    call<Shapes["ConsentShown"]>("GET", "preferences/consent").then(
      (found) => { setConsent(found.consent); sayConsent(found.consent === null ? "You have not said yet: that counts as no." : ""); },
      (error: unknown) => sayConsent(trouble(error)),
    );
  }, []);
  const exported = (format: string) => run(async () => {
    const response = await request("GET", `preferences/export?format=${format}&${filters}`);
    const text = await response.text();
    const rows = text.split("\n").filter(Boolean).length;
    if (!rows) {
      refresh();
      return "";
    }
    save(`local2-${format}.jsonl`, text, "application/x-ndjson");
    return `${counted(rows, "row")} saved.`;
  });
  return (
    <section>
      <h2>Training</h2>
      <label className="check"><input id="consent" type="checkbox" checked={consent === true} onChange={(event) => {
        call<Shapes["ConsentShown"]>("PUT", "preferences/consent", { consent: event.target.checked }).then(
          (found) => { setConsent(found.consent); sayConsent("Kept."); refresh(); },
          (error: unknown) => sayConsent(trouble(error)),
        );
      }} /> My conversations may be used for training</label>
      <p className="dim" role="status">{consentSaid}</p>
      <h3>Preferences as files</h3>
      <label className="check"><input type="checkbox" checked={consented} onChange={(event) => setConsented(event.target.checked)} /> Only of users who agreed</label>
      <label className="check"><input type="checkbox" checked={human} onChange={(event) => setHuman(event.target.checked)} /> Only what a person's vote bears out</label>
      <Note>{wrong}</Note>
      <div className="grid-tools">
        {FORMATS.map(([format, name]) => <button key={format} type="button" className="tool" disabled={counts?.[format].rows === 0} onClick={() => void exported(format)}>{name}{counts && `: ${rowsOf(counts[format])}`}</button>)}
        <Refresh onClick={refresh} />
      </div>
      {counts && FORMATS.map(([format, name]) => counts[format].why && <p key={format} className="dim" dir="auto">{name}: {counts[format].why}.</p>)}
      <p className="dim" role="status">{said}</p>
    </section>
  );
}
