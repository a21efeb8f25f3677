"""What a paper needs of a result: numbers, sentences, methods, figures and references.

Everything comes from the page of the report (`values` collects its numbers and sentences), so a new
quantity of a page is also one of a paper.
"""
