"""Which of the participants' rows are used."""
