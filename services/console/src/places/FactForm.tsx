import type { Fact } from "../api/types";

/** Corrects a fact; hands over what is different, null for nothing. */
export function FactForm({ fact, onDone }: { fact: Fact; onDone(change: Record<string, string> | null): void }) {
  return (
    <form className="form" onSubmit={(event) => {
      event.preventDefault();
      const values = new FormData(event.currentTarget);
      const before: Record<string, string> = { subject: fact.subject.name, relation: fact.relation, object: fact.object.name, holds: fact.state === "was" ? "was" : "is" };
      const change = Object.fromEntries(Object.keys(before).map((name) => [name, String(values.get(name) ?? "").trim()] as const).filter(([name, value]) => value && value !== before[name]));
      onDone(Object.keys(change).length ? change : null);
    }}>
      <input name="subject" aria-label="Who or what" defaultValue={fact.subject.name} maxLength={80} required dir="auto" autoFocus />
      <input name="relation" aria-label="Relation" defaultValue={fact.relation} maxLength={60} required dir="auto" />
      <input name="object" aria-label="To whom or what" defaultValue={fact.object.name} maxLength={80} required dir="auto" />
      <select name="holds" aria-label="Is it so now" defaultValue={fact.state === "was" ? "was" : "is"}><option value="is">is so</option><option value="was">was so</option></select>
      <div className="actions"><button type="button" className="quiet" onClick={() => onDone(null)}>Cancel</button><button type="submit" className="primary">Correct</button></div>
    </form>
  );
}
