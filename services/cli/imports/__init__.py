"""Reading the exports of other products: conversations and memories."""
