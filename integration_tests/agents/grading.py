"""What the examples leave to the user: a grade between 0 and 1, here how much of the label the text has."""


def grade(text, label):
    return min(1.0, len(text) / (len(label) + len(text) + 1))
