// What one participant publishes, live; and a message with its whole content on demand.

import { useState } from "react";
import { useTail, type BusEntry } from "./asking";
import { Note, When } from "./parts";
import { participantOf, questionOf, summaryOf, timeOf } from "./summary";

export function Activity({ participant }: { participant: string }) {
  const { entries, said } = useTail(EVERYTHING, 1_000);
  const own = entries.filter((entry) => participantOf(entry) === participant);
  return (
    <>
      <Note>{said}</Note>
      {own.length ? <Entries entries={own.slice(0, 200)} /> : !said && <p className="dim">It has published nothing lately. What it says next is shown here.</p>}
    </>
  );
}

const EVERYTHING: readonly string[] = [];

interface EntriesProps {
  entries: readonly BusEntry[];
  id?: string;
  onQuestion?(question: string): void;
}

export function Entries({ entries, id, onQuestion }: EntriesProps) {
  return (
    <ol id={id} className="events">
      {entries.map((entry) => <Entry key={`${entry.subject} ${entry.entry_id}`} entry={entry} {...(onQuestion ? { onQuestion } : {})} />)}
    </ol>
  );
}

function Entry({ entry, onQuestion }: { entry: BusEntry; onQuestion?(question: string): void }) {
  const [open, setOpen] = useState(false);
  const question = questionOf(entry);
  return (
    <li>
      <details onToggle={(toggled) => setOpen(toggled.currentTarget.open)}>
        <summary><When ms={timeOf(entry)} /> <b>{entry.subject}</b> <span className="dim">{participantOf(entry)}</span> <span className="said" dir="auto">{summaryOf(entry)}</span></summary>
        {open && (
          <>
            {onQuestion && question && <button type="button" className="tool" onClick={() => onQuestion(question)}>Waterfall of this question</button>}
            <pre className="json" tabIndex={0} dir="ltr">{JSON.stringify(entry, null, 2)}</pre>
          </>
        )}
      </details>
    </li>
  );
}
