// Messages that nobody could handle: why, what they were, and what becomes of them.

import { useCallback, useEffect, useState } from "react";
import { call } from "../api/http";
import { IconButton } from "../ui/parts";
import { useWork, type Shapes } from "./asking";
import { Confirm, Grid, Json, Note, Refresh, Waiting, When, type Column, type Question } from "./parts";
import { counted } from "../words";

type Letter = Shapes["DeadLetterShown"];
type Page = Shapes["DeadLetterPage"];
const PAGE = 100;

const COLUMNS: Column<Letter>[] = [
  { name: "When", value: (one) => one.time ?? Number(one.id.split("-")[0]), cell: (one) => <When ms={one.time ?? Number(one.id.split("-")[0])} /> },
  { name: "Subject", value: (one) => (one.stream ?? "").replace(/^[^:]*:/, "") },
  { name: "Reader", value: (one) => one.group },
  { name: "Attempts", number: true, value: (one) => one.deliveries },
  { name: "Reason", wide: true, value: (one) => one.reason ?? one.malformed },
];

export default function DeadLetters() {
  const [letters, setLetters] = useState<Letter[] | null>(null);
  const [more, setMore] = useState<string | null>(null);
  const [total, setTotal] = useState(0);
  const [question, ask] = useState<Question | null>(null);
  const [said, run] = useWork();
  const load = useCallback((after: string | null, words = "") => run(async () => {
    const page = await call<Page>("GET", `dead-letters?limit=${PAGE}${after ? `&cursor=${encodeURIComponent(after)}` : ""}`);
    setLetters((known) => (after && known ? [...known, ...page.dead_letters] : page.dead_letters));
    setMore(page.next);
    setTotal(page.total);
    return words;
  }), [run]);
  useEffect(() => void load(null), [load]);
  const path = (id: string) => `dead-letters/${encodeURIComponent(id)}`;
  const gone = (id: string) => { setLetters((known) => known?.filter((one) => one.id !== id) ?? null); setTotal((before) => before - 1); };
  return (
    <section>
      <h2>Dead letters</h2>
      <p className="dim">A message is put here when it cannot be read, or when its reader failed as often as it may. Replay puts it back on its stream.</p>
      <Note>{said}</Note>
      {!letters && !said && <Waiting />}
      {letters && (
        <Grid name="Dead letters" rows={letters} keyOf={(one) => one.id} columns={COLUMNS} empty="There are none: everything that was sent could be handled."
          detail={(one) => <><p dir="auto" className="wrapped">{one.reason ?? one.malformed}</p><Json value={one} name="The message" /></>}
          actions={(one) => (
            <>
              <IconButton icon="again" label={`Replay ${one.id}`} disabled={one.malformed !== undefined} onClick={() => void run(async () => {
                const { entry_id } = await call<Shapes["Replayed"]>("POST", `${path(one.id)}/replay`);
                gone(one.id);
                return `Replayed as ${entry_id}.`;
              })} />
              <IconButton icon="trash" label={`Drop ${one.id}`} onClick={() => ask({
                title: "Drop this message?", words: "It is not handled and cannot be replayed any more.", yes: "Drop it",
                act: () => void run(async () => { await call("DELETE", path(one.id)); gone(one.id); return "Dropped."; }),
              })} />
            </>
          )}>
          <Refresh onClick={() => void load(null)} />
          {letters.length > 0 && <button type="button" className="tool danger-text" onClick={() => ask({
            title: `Drop ${total === 1 ? "the only message" : `all ${counted(total, "message")}`}?`, words: "What is dropped is not handled, and cannot be replayed any more.", yes: "Drop all",
            act: () => void run(async () => { const { dropped } = await call<Shapes["DroppedCount"]>("DELETE", "dead-letters"); await load(null); return `${dropped} dropped.`; }),
          })}>Drop all</button>}
        </Grid>
      )}
      {more && <button type="button" className="tool" onClick={() => void load(more)}>Later ones ({total - (letters?.length ?? 0)} more)</button>}
      <Confirm question={question} onClose={() => ask(null)} />
    </section>
  );
}
