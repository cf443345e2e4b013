// What is kept how long, and what would go: before a number is set, it is said what that removes.

import { useState } from "react";
import { call } from "../api/http";
import { useAsked, useWork, type Shapes } from "./asking";
import { Confirm, Grid, Note, Refresh, Waiting, When, type Column, type Question } from "./parts";
import { counted } from "../words";

type Shown = Shapes["RetentionShown"];
type Kind = Shapes["KindKept"];

export const keptFor = (days: number): string => (days === 0 ? "for ever" : counted(days, "day"));

export default function Retention() {
  const { found, wrong, refresh } = useAsked<Shown>("retention");
  const [question, ask] = useState<Question | null>(null);
  const [said, run] = useWork();
  const set = (kind: Kind, days: number) => void run(async () => {
    await call("PATCH", `participants/${encodeURIComponent(kind.participant)}/settings`, { [kind.setting]: days });
    refresh();
    return `${kind.kind}: kept ${keptFor(days)}.`;
  });
  const change = (kind: Kind, days: number) => void run(async () => {
    if (!days) return set(kind, days);
    const would = await call<Shown>("GET", `retention?days=${days}`);
    const due = would.kinds.find((one) => one.kind === kind.kind)?.due ?? 0;
    if (!due) return set(kind, days);
    ask({ title: `Keep ${kind.kind} for ${keptFor(days)}?`, words: `${due} of ${kind.kept} ${due === 1 ? "is" : "are"} older, and will be removed for good within a day.`, yes: "Keep them so long", act: () => set(kind, days) });
  });
  const columns: Column<Kind>[] = [
    { name: "Kind", value: (one) => one.kind, wide: true },
    { name: "Kept", value: (one) => one.kept, number: true },
    { name: "Oldest", value: (one) => one.oldest, cell: (one) => (one.oldest === null ? "–" : <When ms={one.oldest} />) },
    { name: "Kept for", value: (one) => one.keep_days, cell: (one) => keptFor(one.keep_days) },
    { name: "Would go now", value: (one) => one.due, number: true },
  ];
  return (
    <section>
      <h2>Retention</h2>
      <p className="dim">What is older than its number of days is removed for good, as if it were deleted by hand. Pinned sessions and facts that a person has entered stay. 0 days: for ever.</p>
      <Note>{wrong || said}</Note>
      {!found && !wrong && <Waiting />}
      {found && (
        <Grid name="What is kept how long" rows={found.kinds} keyOf={(one) => one.kind} columns={columns} empty="Nobody keeps anything." searched={false}
          actions={(one) => (
            <form className="row-form" onSubmit={(event) => { event.preventDefault(); change(one, Number(new FormData(event.currentTarget).get("days"))); }}>
              <label htmlFor={`keep-${one.kind}`} className="hidden-text">Days that {one.kind} are kept</label>
              <input id={`keep-${one.kind}`} name="days" type="number" min="0" max="36500" step="1" required defaultValue={one.keep_days} key={one.keep_days} /> <span aria-hidden="true">days</span>
              <button type="submit" className="tool">Set</button>
            </form>
          )}>
          <Refresh onClick={refresh} />
        </Grid>
      )}
      {found?.away.map((one) => <Note key={one.participant}>{one.participant} could not be asked: {one.reason}</Note>)}
      <Confirm question={question} onClose={() => ask(null)} />
    </section>
  );
}
