"""web_search: finds pages for a query."""
