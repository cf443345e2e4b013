import { useEffect } from "react";
import { App } from "./App";
import type { Account } from "./account";
import { useStore } from "./chat/store";
import { SignIn } from "./SignIn";
import { useTheme } from "./theme";

/** The page for a user who is signed in, or the dialog for one who is not. */
export function Root({ account }: { account: Account }) {
  useStore(account);
  const [theme, setTheme] = useTheme();
  useEffect(() => {
    void account.open();
    return () => account.close();
  }, [account]);
  const { access } = account;
  if (access.at === "opening") return null;
  if (access.at === "out") return <SignIn reason={access.reason} onKey={(key, remember) => account.signIn(key, remember)} />;
  return <App theme={theme} onTheme={setTheme} onSignOut={access.withKey ? () => account.signOut() : null} />;
}
