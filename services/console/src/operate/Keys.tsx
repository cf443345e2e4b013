// Who may come in: keys, users and roles. A new key is shown once.

import { useState } from "react";
import { call } from "../api/http";
import { Dialog, IconButton } from "../ui/parts";
import { useAsked, useWork, type Shapes } from "./asking";
import type { PageProps } from "./Operate";
import { Confirm, Grid, Note, Refresh, State, Waiting, When, type Column, type Question } from "./parts";

type Key = Shapes["Key"];

const COLUMNS: Column<Key>[] = [
  { name: "Name", wide: true, value: (one) => one.name },
  { name: "User", value: (one) => one.user_id },
  { name: "Role", value: (one) => one.role, cell: (one) => <State fine="">{one.role === "admin" ? "administrator" : "user"}</State> },
  { name: "Trusted", value: (one) => (one.trusted ? "may speak for other users" : ""), cell: (one) => (one.trusted ? "may speak for other users" : "no") },
  { name: "Made", value: (one) => one.created, cell: (one) => <When ms={one.created} /> },
  { name: "Ends", value: (one) => one.until, cell: (one) => (one.until ? <When ms={one.until} /> : "never") },
  { name: "Id", value: (one) => one.id, cell: (one) => <code>{one.id}</code> },
];

export default function Keys({ onGo }: PageProps) {
  const { found, wrong, refresh } = useAsked<Shapes["KeyList"]>("keys");
  const [question, ask] = useState<Question | null>(null);
  const [making, make] = useState(false);
  const [fresh, show] = useState<{ title: string; secret: string; about: string } | null>(null);
  const [said, run] = useWork();
  return (
    <section>
      <h2>Keys</h2>
      <p className="dim">Every user sees only what is theirs; administrators see this place, too. A key that is revoked stops working within two seconds. How much may wait for an answer stands in <button type="button" className="link" onClick={() => onGo("participants/gateway/settings")}>the gateway's settings</button>.</p>
      <Note>{wrong || said}</Note>
      {!found && !wrong && <Waiting />}
      {found && (
        <Grid name="Keys" rows={found.keys} keyOf={(one) => one.id} columns={COLUMNS} empty="There is no key."
          actions={(one) => <IconButton icon="trash" label={`Revoke ${one.name}`} onClick={() => ask({
            title: `Revoke “${one.name}”?`, words: `Whoever uses it is shut out. What belongs to ${one.user_id} stays.`, yes: "Revoke it",
            act: () => void run(async () => { await call("DELETE", `keys/${encodeURIComponent(one.id)}`); refresh(); return `“${one.name}” is revoked.`; }),
          })} />}>
          <button type="button" className="primary" onClick={() => make(true)}>New key</button>
          <button type="button" className="tool" onClick={() => void run(async () => {
            const link = await call<Shapes["Link"]>("POST", "keys/link");
            show({ title: "A link that signs in as you", secret: new URL(link.path.replace(/^\//, ""), document.baseURI.split("#")[0]).href, about: `It works once, within ${link.seconds} seconds, for whoever opens it.` });
          })}>One-time link</button>
          <Refresh onClick={refresh} />
        </Grid>
      )}
      <Dialog open={making} onClose={() => make(false)} title="New key">
        <form className="form" onSubmit={(event) => {
          event.preventDefault();
          const values = new FormData(event.currentTarget);
          const body = { name: String(values.get("name")).trim(), user_id: String(values.get("user_id")).trim(), role: values.get("role"), trusted: values.get("trusted") === "on" };
          make(false);
          void run(async () => {
            const made = await call<Shapes["NewKey"]>("POST", "keys", body);
            refresh();
            show({ title: `The key “${made.name}”`, secret: made.key, about: "It is shown this once. Whoever has it is this user." });
          });
        }}>
          <label htmlFor="key-name">Name</label><input id="key-name" name="name" required autoFocus autoComplete="off" placeholder="Ann's laptop" />
          <label htmlFor="key-user">User</label><input id="key-user" name="user_id" required autoComplete="off" placeholder="ann" />
          <label htmlFor="key-role">Role</label><select id="key-role" name="role" defaultValue="user"><option value="user">user</option><option value="admin">administrator</option></select>
          <label className="check"><input name="trusted" type="checkbox" /> May speak for other users (for an application that signs its own users in)</label>
          <div className="actions"><button type="button" className="quiet" onClick={() => make(false)}>Cancel</button><button type="submit" className="primary">Make it</button></div>
        </form>
      </Dialog>
      <Dialog open={fresh !== null} onClose={() => show(null)} title={fresh?.title ?? ""}>
        <p>{fresh?.about}</p>
        <p className="secret"><code>{fresh?.secret}</code> <IconButton icon="copy" label="Copy it" onClick={() => void navigator.clipboard?.writeText(fresh?.secret ?? "").catch(() => {})} /></p>
        <div className="actions"><button type="button" className="primary" onClick={() => show(null)}>I have it</button></div>
      </Dialog>
      <Confirm question={question} onClose={() => ask(null)} />
    </section>
  );
}
