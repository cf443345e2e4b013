import { createRoot } from "react-dom/client";
import { Account } from "./account";
import { Root } from "./Root";
import "./styles.css";

createRoot(document.getElementById("root")!).render(<Root account={new Account()} />);
