"""The rate cards in force at an instant, as far as servers could know them then. Pure."""

from billing.prices.book import NS, PriceBook

# A server sees a new card within a second. Clocks of hosts differ and are set; beyond two minutes a
# server takes no requests.
LAG_NS = 600 * NS

Ref = tuple[str, str]  # a card's name and version


class CardHistory:
    """The applied cards, in the order in which they were applied."""

    def __init__(self, book: PriceBook) -> None:
        self._cards = sorted(book.cards, key=lambda card: card.applied_ns)

    def at(self, model: str, admitted_ns: int, currency: str, tenant: str) -> set[Ref]:
        """The cards that may have priced a request admitted at that instant.

        A card applied well before cannot have been missed. A card with a later date may still have
        been known: if the clock was set back since, or, for an hour of a pin, if no card priced it
        when it began.
        """
        seen: set[Ref] = set()
        known = [card for card in self._cards if card.applied_ns < admitted_ns - LAG_NS]
        others = [card for card in self._cards if card.applied_ns >= admitted_ns - LAG_NS]
        for more in ([], *([card] for card in others)):  # in any order, because clocks dated them
            card = PriceBook((*known, *more)).card_for(model, admitted_ns, currency, tenant)
            if card is not None:
                seen.add((card.name, card.version))
        return seen
