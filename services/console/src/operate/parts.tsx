// Parts of the operators' pages: tables, JSON on demand, questions before what cannot be undone.

import { Fragment, useId, useState, type ReactNode } from "react";
import { Icon } from "../ui/icons";
import { counted } from "../words";
import { Dialog } from "../ui/parts";
import { arranged, isMissing, type Cell, type Order } from "./sorting";

export interface Column<T> {
  name: string;
  /** What it is sorted and found by; as it is shown unless `cell` says more. */
  value(row: T): Cell;
  cell?(row: T): ReactNode;
  number?: boolean;
  /** Takes the room that is left, and breaks lines. */
  wide?: boolean;
}

interface GridProps<T> {
  name: string;
  id?: string;
  rows: readonly T[];
  keyOf(row: T): string;
  columns: readonly Column<T>[];
  order?: Order;
  /** What stands below a row that is opened. */
  detail?(row: T): ReactNode;
  actions?(row: T): ReactNode;
  /** Said when there are no rows at all. */
  empty: string;
  /** Whether there is a field to look for words. */
  searched?: boolean;
  children?: ReactNode;
  rowClass?(row: T): string;
}

/** A table that is sorted by its heads, and searched by a field. */
export function Grid<T>({ name, id, rows, keyOf, columns, order: first, detail, actions, empty, searched = true, children, rowClass }: GridProps<T>) {
  const [order, setOrder] = useState<Order | null>(first ?? null);
  const [words, setWords] = useState("");
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  const field = useId();
  const value = (row: T, column: string) => columns.find((one) => one.name === column)?.value(row);
  const shown = arranged(rows, value, columns.map((one) => one.name), words, order);
  const sorted = (column: string) => (order?.column === column ? (order.descending ? "descending" : "ascending") : "none");
  // a row is named by its text, or else by what stands first
  const head = Math.max(0, columns.findIndex((one) => one.wide));
  const span = columns.length + (detail ? 1 : 0) + (actions ? 1 : 0);
  return (
    <>
      {(searched || children) && (
        <div className="grid-tools">
          {searched && <><label htmlFor={field} className="hidden-text">Filter {name}</label><input id={field} type="search" placeholder="Filter" autoComplete="off" value={words} onChange={(event) => setWords(event.target.value)} /></>}
          {children}
          <span className="dim grid-count" role="status">{words ? `${shown.length} of ` : ""}{counted(rows.length, "row")}</span>
        </div>
      )}
      {rows.length === 0 ? <p className="dim">{empty}</p> : (
        <div className="table" role="region" aria-label={name} tabIndex={0}>
          {/* on a narrow screen its rows are cards, which a browser would not call a table any more: so the roles say it */}
          <table className="grid" id={id} role="table">
            <thead role="rowgroup">
              <tr role="row">
                {detail && <th scope="col" role="columnheader" className="bare"><span className="hidden-text">More</span></th>}
                {columns.map((column) => (
                  <th key={column.name} scope="col" role="columnheader" aria-sort={sorted(column.name)} className={column.number ? "number" : undefined}>
                    <button type="button" onClick={() => setOrder((before) => ({ column: column.name, descending: before?.column === column.name ? !before.descending : Boolean(column.number) }))}>
                      {column.name}{" "}<span className="sorted" aria-hidden="true">{order?.column === column.name ? (order.descending ? "↓" : "↑") : ""}</span>
                    </button>
                  </th>
                ))}
                {actions && <th scope="col" role="columnheader" className="bare"><span className="hidden-text">Actions</span></th>}
              </tr>
            </thead>
            <tbody role="rowgroup">
              {shown.length === 0 && <tr role="row"><td role="cell" colSpan={span} className="dim">No row has these words.</td></tr>}
              {shown.map((row) => {
                const key = keyOf(row);
                const isOpen = open.has(key);
                return (
                  <Fragment key={key}>
                    <tr role="row" className={rowClass?.(row)}>
                      {detail && (
                        <td role="cell" className="opener">
                          <button type="button" className="icon-button" aria-expanded={isOpen} aria-label={`${isOpen ? "Close" : "Open"}: ${String(columns[head]?.value(row) || key).slice(0, 80)}`}
                            onClick={() => setOpen((before) => { const now = new Set(before); if (!now.delete(key)) now.add(key); return now; })}>
                            <span className="twist" aria-hidden="true" />
                          </button>
                        </td>
                      )}
                      {columns.map((column, at) => {
                        const shownAs = column.cell ? column.cell(row) : shownText(column.value(row));
                        const kind = [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || undefined;
                        return at === head ? <th key={column.name} scope="row" role="rowheader" className={kind} dir={column.wide ? "auto" : undefined}>{shownAs}</th> : <td key={column.name} role="cell" className={kind} data-name={column.name} data-empty={isMissing(column.value(row)) || undefined}>{shownAs}</td>;
                      })}
                      {actions && <td role="cell" className="row-actions">{actions(row)}</td>}
                    </tr>
                    {detail && isOpen && <tr role="row" className="detail"><td role="cell" colSpan={span}>{detail(row)}</td></tr>}
                  </Fragment>
                );
              })}
            </tbody>
          </table>
        </div>
      )}
    </>
  );
}

const shownText = (value: Cell): string => (isMissing(value) ? "–" : String(value));

/** What stands where something is on its way. */
export const Waiting = () => <p className="dim" role="status">Loading …</p>;

/** A value as JSON, read by whoever asks for it. */
export function Json({ value, name = "As JSON" }: { value: unknown; name?: string }) {
  const [open, setOpen] = useState(false);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{name}</summary>
      {open && <pre className="json" tabIndex={0} dir="ltr">{JSON.stringify(value, null, 2)}</pre>}
    </details>
  );
}

export interface Question {
  title: string;
  words: string;
  /** What the button says that does it. */
  yes: string;
  act(): void;
}

/** A question before something that cannot be undone. */
export function Confirm({ question, onClose }: { question: Question | null; onClose(): void }) {
  return (
    <Dialog open={question !== null} onClose={onClose} title={question?.title ?? ""}>
      <p>{question?.words}</p>
      <div className="actions">
        <button type="button" className="quiet" onClick={onClose} autoFocus>Keep it as it is</button>
        <button type="button" className="danger" onClick={() => { onClose(); question?.act(); }}>{question?.yes}</button>
      </div>
    </Dialog>
  );
}

export function Note({ children }: { children: ReactNode }) {
  return children ? <p className="note" role="status">{children}</p> : null;
}

/** A state in words with a colour that says the same. */
export function State({ fine, children }: { fine: "good" | "fair" | "poor" | ""; children: ReactNode }) {
  return <span className={`badge ${fine}`}>{children}</span>;
}

export function Refresh({ onClick }: { onClick(): void }) {
  return <button type="button" className="tool" onClick={onClick}><Icon name="again" /> Refresh</button>;
}

/** A moment as people read it, with the whole of it on demand. Anything that is no moment is shown as it is. */
export function When({ ms }: { ms: number }) {
  const at = new Date(ms);
  if (!Number.isFinite(at.getTime())) return <>–</>;
  const today = at.toDateString() === new Date().toDateString();
  const shown = today ? at.toLocaleTimeString([], { hour12: false }) : at.toLocaleString([], { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
  return <time dateTime={at.toISOString()} title={at.toISOString()}>{shown}</time>;
}

export const percent = (share: number): string => `${Math.round(share * 100)} %`;
export const sum = <T,>(items: readonly T[], value: (item: T) => number | null | undefined): number => items.reduce((total, item) => total + (value(item) ?? 0), 0);
