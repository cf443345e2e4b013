// What one participant publishes, live; and a message with its whole content on demand.

import { useState } from "react";
import { useTail, type BusEntry } from "./asking";
import { Note, Waiting, When } from "./parts";
import { isState, participantOf, questionOf, sessionOf, summaryOf, timeOf, type Wanted } from "./summary";

const SHOWN = 200;
const EVERYTHING: readonly string[] = [];

export function Activity({ participant, onGo }: { participant: string; onGo(page: string): void }) {
  const { entries, said, there } = useTail(EVERYTHING, 1_000);
  const [states, showStates] = useState(false);
  const own = entries.filter((entry) => participantOf(entry) === participant);
  const shown = states ? own : own.filter((entry) => !isState(entry));
  return (
    <>
      <div className="filters"><StateSwitch on={states} all={own} onChange={showStates} /></div>
      <Note>{said}</Note>
      {shown.length ? <Entries entries={shown.slice(0, SHOWN)} by={false} onQuestion={(id) => onGo(`bus/${id}`)} />
        : there ? <p className="dim">{own.length ? "It has changed its state only." : "It has published nothing lately."} What it says next is shown here.</p> : !said && <Waiting />}
    </>
  );
}

/** Most messages say only in which state somebody is; they are shown to whoever asks for them. */
export function StateSwitch({ on, all, onChange }: { on: boolean; all: readonly BusEntry[]; onChange(on: boolean): void }) {
  return <label className="check"><input type="checkbox" checked={on} onChange={(event) => onChange(event.target.checked)} /> Changes of state, too ({all.filter(isState).length})</label>;
}

interface EntriesProps {
  entries: readonly BusEntry[];
  id?: string;
  /** Whether they are of several participants, so that each says whose it is. */
  by?: boolean;
  onQuestion?(question: string): void;
  /** Shows only those that belong together. */
  onOnly?(wanted: Partial<Wanted>): void;
}

export function Entries({ entries, id, ...rest }: EntriesProps) {
  return (
    <ol id={id} className="events">
      {entries.map((entry) => <Entry key={`${entry.subject} ${entry.entry_id}`} entry={entry} {...rest} />)}
    </ol>
  );
}

function Entry({ entry, by = true, onQuestion, onOnly }: Omit<EntriesProps, "entries" | "id"> & { entry: BusEntry }) {
  const [open, setOpen] = useState(false);
  const question = questionOf(entry);
  const session = sessionOf(entry);
  return (
    <li>
      <details onToggle={(toggled) => setOpen(toggled.currentTarget.open)}>
        <summary><When ms={timeOf(entry)} /> <b>{entry.subject}</b> {by && <span className="dim">{participantOf(entry)}</span>} <span className="said" dir="auto">{summaryOf(entry)}</span></summary>
        {open && (
          <>
            <div className="row">
              {onQuestion && question && <button type="button" className="tool" onClick={() => onQuestion(question)}>Waterfall of this question</button>}
              {onOnly && question && <button type="button" className="tool" onClick={() => onOnly({ question })}>Only this question</button>}
              {onOnly && session && <button type="button" className="tool" onClick={() => onOnly({ session })}>Only this session</button>}
            </div>
            <pre className="json" tabIndex={0} dir="ltr">{JSON.stringify(entry, null, 2)}</pre>
          </>
        )}
      </details>
    </li>
  );
}
