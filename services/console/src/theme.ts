import { useEffect, useState } from "react";
import { keep, kept } from "./storage";

export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

/** Return the colours of the page and their setter: a preference of the device, which survives a sign-out. */
export function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(() => kept<Theme>("theme", "auto"));
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme;
    keep("theme", theme);
  }, [theme]);
  return [theme, setTheme];
}
