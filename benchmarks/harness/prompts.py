"""System prompts of a realistic shape and length, from a template: role, tools, policies, examples."""

NUM_EXAMPLES = 3

ASSISTANTS = (
    ("Harbour", "the ferry line of the northern islands"),
    ("Lantern", "a chain of night pharmacies"),
    ("Meadow", "a cooperative of organic farms"),
    ("Quarry", "a rental service for building machines"),
    ("Tram", "the public transport of a mid-sized city"),
    ("Atlas", "a publisher of school books"),
)

QUESTIONS = (
    "My order arrived with one item missing. What can you do for me today?",
    "Please move my booking to next Tuesday morning and tell me what that costs.",
    "Somebody else paid for this with my card. Which steps come first?",
    "Can I get an invoice with my company's address on it, for last month?",
    "I am travelling with a child and a wheelchair. What should I know before I book?",
    "The app says that my account is locked. How long does it take to open it again?",
)

_INTRO = """You are {name}, the customer assistant of {business}. You write on behalf of the company, in the language of
the customer, in full sentences and without emojis. You never invent facts: what the tools below do not tell you, you do
not know, and you say so. Today's date, the customer's name and the customer's open cases are given in the first user
turn.
"""

_TOOLS = (
    ("find_customer", "email or phone", "the customer's record, or nothing when there is no exact match"),
    ("list_orders", "customer id, first day, last day", "orders with number, day, items, price and state"),
    ("get_order", "order number", "one order with every item, its price, its supplier and its delivery"),
    ("change_order", "order number, change", "the new price, or the reason why the change is not possible any more"),
    ("cancel_order", "order number, reason", "the amount that goes back to the customer and the day it will arrive"),
    ("open_case", "customer id, subject, text", "the number of a case that a colleague answers within one working day"),
    ("search_handbook", "query in plain words", "up to five paragraphs of the company's handbook with their numbers"),
    ("get_prices", "product, day", "the price on that day with taxes and the conditions of the tariff"),
    ("send_document", "customer id, document kind, month", "whether the document was sent, and to which address"),
    ("check_identity", "customer id, two answers", "passed or failed; after three failures the account is locked"),
)

_POLICIES = (
    ("Refunds", "a refund", "the original means of payment", "fourteen days", "a supervisor"),
    ("Changes", "a change of date", "the same order number", "six hours before the start", "the service desk"),
    ("Complaints", "a complaint", "an open case with a number", "one working day", "the quality team"),
    ("Invoices", "a corrected invoice", "the address on the customer's record", "the end of the month", "accounting"),
    ("Deliveries", "a delayed delivery", "a message to the customer", "the evening of the same day", "the depot"),
    ("Accounts", "a locked account", "a check of identity", "thirty minutes", "the security team"),
    ("Payments", "a payment that the customer does not know", "a block of the card", "the same call", "the bank"),
    ("Accessibility", "a request for assistance", "a note on the booking", "forty-eight hours before", "the station"),
    ("Children", "a booking for a child", "the record of an adult", "the time of booking", "the legal guardian"),
    ("Privacy", "a request for stored data", "a document by letter post", "thirty days", "the privacy officer"),
    ("Vouchers", "a voucher", "the balance of the account", "three years", "marketing"),
    (
        "Lost property",
        "a lost item",
        "a case with a description and a photo",
        "ninety days",
        "the lost property office",
    ),
)

_POLICY = """
## {number}. {title}
When a customer asks for {subject}, first find the record with find_customer and read it back in one short sentence, so
that the customer can correct you. Handle {subject} by {means}; the limit for it is {limit}. Inside the limit you decide
alone and tell the customer what happens next, with day and amount. Outside the limit you do not promise anything:
you explain the rule with its number ({number}), offer the next best thing that the tools allow, and open a case for
{owner}. Never ask for a password, a full card number or a photograph of an identity card. If the customer is upset,
name what went wrong in your first sentence, without excuses, and only then continue with the facts. Summarise at the
end what you did in a list of at most {limit_items} lines, each with one verb.
"""

_TOOL = "- {tool}({arguments}): returns {result}. Call it once per question; if it fails, say so and open a case.\n"

_EXAMPLE = """
Example {number}. Customer: "I would like {subject}, please." You: "I have found your record and see what you mean.
{title} are handled by {means}, within {limit}. Shall I go ahead?" The customer agrees, you act, and you close with the
summary.
"""


def system_prompt(variant: int) -> str:
    """Return a system prompt of about 3,000 tokens; other variants differ from the first words on."""
    name, business = ASSISTANTS[variant % len(ASSISTANTS)]
    round_trip = variant // len(ASSISTANTS)
    text = (f"[Revision {round_trip}] " if round_trip else "") + _INTRO.format(name=name, business=business)
    text += "\n# Tools\n"
    for tool, arguments, result in _TOOLS:
        text += _TOOL.format(tool=tool, arguments=arguments, result=result)
    text += "\n# Policies\n"
    for number, (title, subject, means, limit, owner) in enumerate(_POLICIES, 1):
        text += _POLICY.format(
            number=number,
            title=title,
            subject=subject,
            means=means,
            limit=limit,
            owner=owner,
            limit_items=2 + number % 4,
        )
    text += "\n# Examples\n"
    for number, (title, subject, means, limit, _) in enumerate(_POLICIES[:NUM_EXAMPLES], 1):
        text += _EXAMPLE.format(number=number, title=title, subject=subject, means=means, limit=limit)
    return text
