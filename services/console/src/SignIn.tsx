import { useId, useRef, useState } from "react";

interface SignInProps {
  /** Why a key is needed; "" for no reason. */
  reason: string;
  /** Returns whether the key is good. */
  onKey(key: string, remember: boolean): Promise<boolean>;
}

/** The sign-in dialog. It has no page behind it, and only a valid key closes it. */
export function SignIn({ reason, onKey }: SignInProps) {
  const [wrong, setWrong] = useState("");
  const [checking, check] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  const heading = useId();
  const refuse = (words: string) => {
    check(false);
    setWrong(words);
    field.current?.select();
  };
  return (
    <main className="sign-in">
      <div role="dialog" aria-modal="true" aria-labelledby={heading} className="dialog">
        <form className="form" onSubmit={(event) => {
          event.preventDefault();
          const values = new FormData(event.currentTarget);
          const key = String(values.get("key") ?? "").trim();
          if (!/^[\x21-\x7e]+$/.test(key)) return refuse("A key has no spaces or special letters.");
          setWrong("");
          check(true);
          onKey(key, values.get("remember") === "on").then(
            (good) => { if (!good) refuse("This key is not valid."); },
            (error: unknown) => refuse(error instanceof Error ? error.message : String(error)),
          );
        }}>
          <h1 id={heading} className="dialog-title">Sign in</h1>
          <p>Open the link that <code>local2 run</code> printed, or get another one with <code>local2 keys link</code>: the link signs you in by itself. Or enter a key.</p>
          {(wrong || reason) && <p className="error-text" role="alert">{wrong || reason}</p>}
          <label htmlFor="key">Key</label>
          <input ref={field} id="key" name="key" type="password" autoComplete="off" spellCheck={false} required readOnly={checking} autoFocus />
          <label className="check"><input name="remember" type="checkbox" defaultChecked /> Remember it in this browser</label>
          <div className="actions">
            <button type="submit" className="primary" disabled={checking}>{checking ? "Checking …" : "Sign in"}</button>
          </div>
        </form>
      </div>
    </main>
  );
}
