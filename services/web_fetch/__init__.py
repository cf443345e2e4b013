"""web_fetch: reads one page, safely."""
