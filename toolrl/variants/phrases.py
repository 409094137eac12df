"""Phrases of system prompts and of reasoning_gym's questions, each with other words of the same meaning.

Only whole phrases that no question's own text holds by chance; numbers stand in the same order on both sides.
"""

from __future__ import annotations

SYSTEM = {
    "You are a helpful assistant.": "You are an assistant who helps people.",
    "Use the tools to compute.": "Do all computing with your tools.",
    "Put the final answer in \\boxed{}.": "Write what you finally answer inside \\boxed{}.",
    "Use python.": "Work with python.",
    "Use python": "Work with python",
    "Answer in \\boxed{}.": "Give your answer inside \\boxed{}.",
    "Solve the problem.": "Find the solution of the problem.",
    "Use the python tool to compute and to check what you found; its variables live on between calls.": (
        "Compute with the python tool and verify your findings with it; from one call to the next it keeps its variables."
    ),
    "Let's think step by step": "Let us go through it one step after the other",
}

QUESTION = {
    # chain_sum, decimal_chain_sum
    "State the final answer to the following arithmetic problem:": "What does this calculation come to in the end?",
    # products
    "Solve the following multiplication:": "Multiply:",
    "Give only the result as your final answer.": "Answer with nothing but the product.",
    # gcd, lcm
    "Find the Greatest Common Divisor (GCD) of these numbers:": "What is the largest whole number that divides all of:",
    "Give only the GCD as your final answer.": "Answer with that number alone.",
    "Find the Least Common Multiple (LCM) of these numbers:": "What is the smallest positive multiple that is shared by:",
    # prime_factorization
    "Find the prime factorization of": "Which prime numbers have as their product",
    "Write the factors separated by ×": "Put the sign × between them",
    "Example: for 12 the answer would be:": "for 12, say:",
    # count_bits, count_primes
    "How many 1 bits are there in the binary representation of the number": (
        "Count the 1 digits of this number when it is written in base two:"
    ),
    "Count how many prime numbers there are between": "Say how many primes lie between",
    # leg_counting
    "Your task is to count how many legs there are in total when given a list of animals.": (
        "You are given a list of animals and say how many legs all of them have together."
    ),
    "Now, how many legs are there in total if you have": "So, what number of legs belongs to",
    # fraction_simplification
    "to its lowest terms.": "as far as it goes.",
    "Give only the simplified fraction as your final answer.": "Answer with the reduced fraction alone.",
    # letter_counting
    "How many times does the letter": "Count how often the letter",
    "appear in the text:": "stands in this text:",
    # base_conversion, power_function
    "Your task is to convert a number between two different bases.": "A number is to be written in another base.",
    "If the target base is > 10, use lowercase letters a-z for digits above 9.": (
        "Should the new base be > 10, the digits above 9 are lowercase letters a-z."
    ),
    "Now, convert the": "Convert, please, the",
    "Your task is to compute an exponentiation of a number.": "A number is to be raised to a power.",
    "Return your final answer correct to 3 significant figures.": "Round what you answer to 3 significant figures.",
}
