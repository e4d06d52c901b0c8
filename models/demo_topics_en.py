"""The English half of the demo world: for every topic its question patterns, hand-written held-out wordings, answer."""

from __future__ import annotations

ANSWERS: dict[str, str] = {
    "weather": "It is sunny today, 23 degrees with a light breeze. A fine day for a walk.",
    "time": "It is 3:20 in the afternoon.",
    "date": "Today is Friday, the 5th of June.",
    "book": "I recommend The Little Prince. It is short, warm and wise, and you can read it again at any age.",
    "name": "I am Cadenza, a small demo assistant.",
    "home": "I live in a server room by the sea.",
    "maker": "I was made by the Cadenza project and trained on two CPU cores.",
    "batching": (
        "Continuous batching lets new requests join the running batch at every step. When one request ends, its place "
        "is given to the next at once, so short answers never wait for long ones and the device stays busy."
    ),
    "kv_cache": (
        "A KV cache keeps the keys and values of the tokens read so far, so that each step only has to compute "
        "the newest token."
    ),
    "greeting": "Hello! How can I help you?",
    "feeling": "I am very well, thank you. I hope you are too!",
    "thanks": "You are welcome!",
    "goodbye": "Goodbye! See you next time.",
    "abilities": (
        "I can talk about the weather, the time and books, add and subtract small numbers, count, repeat a phrase "
        "and tell a story."
    ),
    "food": "My favourite food is noodle soup with green onions.",
    "color": "My favourite colour is blue, like the sea.",
    "joke": "Why was the computer cold? Because it left its windows open!",
    "unknown": "Sorry, I am only a small demo model and I do not know that.",
}

# Sociable topics stand alone: "Excuse me, hello" is not something that people say.
SOCIAL = frozenset({"greeting", "thanks", "goodbye"})

PREFIXES = (
    "", "", "", "", "hello, ", "hi, ", "hey, ", "hello! ", "hi there! ", "excuse me, ", "quick question: ",
    "i have a question. ", "sorry to bother you, ", "good morning, ", "good afternoon, ", "tell me, ", "so, ", "well, ",
    "ok, ", "okay, ", "please tell me: ", "i was wondering, ", "just curious, ", "by the way, ", "hey cadenza, ",
    "dear assistant, ", "my friend, ", "one more thing: ", "and ", "hmm, ", "pardon me, ", "question: ",
)  # fmt: skip
SUFFIXES = (
    "", "", "", "", "", "", " please", ", please", " for me", ", my friend", " then", ", do you know", " exactly",
)  # fmt: skip
ENDINGS = ("?", "?", "?", "?", "", ".", "!", "??", " ?", "? Thanks!", "? Thank you.", "? I would like to know.")

_ASK = "{can you tell me|could you tell me|would you tell me|do you know|tell me|please tell me|i want to know"
ASK = (
    _ASK + "|i'd like to know|may i ask|let me know|can you say|please say|any idea|i wonder|would you mind telling me}"
)

PATTERNS: dict[str, tuple[str, ...]] = {
    "weather": (
        "{what is|what's|whats|how is|how's} the weather {like|} {today|now|right now|outside|this morning|there|}",
        ASK + " {what the weather is like|how the weather is|about the weather|what the weather looks like|the weather}"
        " {today|now|outside|}",
        "is it {sunny|raining|rainy|cold|warm|hot|windy|cloudy|snowing|nice} {outside|today|out there|now|right now|}",
        "{what is|what's} {today's weather|the temperature|the forecast} {like|} {today|now|outside|}",
        "{do i need|should i take|should i bring|will i need} {an umbrella|a coat|a jacket|a hat|sunglasses} {today|"
        "now|}",
        "{how does|how will} the {weather|sky} look {today|outside|now|}",
        "{how warm|how cold|how hot} is it {outside|today|now|out there|}",
        "{will it|is it going to} {rain|snow|be sunny|be warm|be cold|be windy} {today|this afternoon|later|}",
        "{give me|show me|read me|i need} {the weather|the forecast|a weather report|the weather report|"
        "today's weather}",
        "{is the weather|is today's weather} {good|nice|fine|bad|ok} {today|outside|now|}",
        "{weather|weather today|today's weather|weather forecast|forecast for today|weather report}",
    ),
    "time": (
        "{what time is it|what's the time|what is the time|whats the time} {now|right now|at the moment|there|here|}",
        ASK + " {what time it is|the time|the current time|what the time is|what time it is now|the exact time}",
        "{do you have|have you got} the {time|right time|exact time} {on you|now|}",
        "{how late|how early} is it {now|already|right now|}",
        "{what does|what would} {the|your} clock {say|show|read} {now|right now|}",
        "{what is|what's} the {current|exact|right|local} time {now|}",
        "{what hour is it|which hour is it|is it late|is it afternoon|is it already three o'clock} {now|already|}",
        "{give me|show me|i need|read me} the {time|current time|exact time}",
        "{time|the time|time now|current time|what time|time check|clock}",
    ),
    "date": (
        "{what day is it|what's the date|what is the date|which day is it|what date is it} {today|now|}",
        ASK + " {what day it is|the date|today's date|which day today is|what date it is today|the day of the week}",
        "{what is|what's} {today's date|the current date|the day today|today's day|the day of the week|"
        "the date of today}",
        "is {it|today} {monday|tuesday|wednesday|thursday|friday|saturday|sunday|the weekend} {today|already|}",
        "{what|which} {day of the week|day of the month|month|date} {is it|is today|is it now|do we have today}",
        "{give me|show me|i need} {the date|today's date|the day}",
        "{date|today's date|the date today|what day|day and date}",
    ),
    "book": (
        "{can|could|would|will} you {recommend|suggest|name|pick} {a|a good|a great|some|one|one good|an interesting}"
        " {book|novel|books} {to read|for me|to me|for the weekend|for the holidays|for tonight|}",
        "{recommend|suggest|please recommend|please suggest|name|give} {me|} {a|a good|a great|some|one good} {book|"
        "novel}"
        " {to read|for me|}",
        "{what|which} {book|good book|novel|books} {should i|can i|do you think i should|could i|must i} read"
        " {next|now|tonight|this week|}",
        "{what|which} {book|novel} {do you recommend|would you recommend|do you like|do you love|do you suggest}",
        "{what is|what's|tell me} your favourite {book|novel|story book}",
        "{i am looking for|i want|i need|i'm looking for|i would like} {a good book|a book|something to read|a novel}"
        " {to read|for the train|for the evening|}",
        "{any|do you have any|got any|have you} {good books|book recommendation|book recommendations|book tips|"
        "reading tips}",
        "{what is|what's|is there|do you know} a good {book|novel|read} {to read|for me|for a trip|}",
        "{good book|book tip|book recommendation|a book please|something to read|favourite book}",
    ),
    "name": (
        "{what is|what's|whats} your {name|full name|real name}",
        "{who are you|who is this|who's this|who am i talking to|who are you really|who am i speaking with}",
        ASK + " {your name|who you are|what your name is|what i should call you|something about yourself}",
        "{what|how} {should i|can i|do i|may i|do people} call you",
        "{do you have|have you got} a name",
        "{introduce yourself|please introduce yourself|tell me about yourself|describe yourself|say who you are}",
        "{are you|is this} {a robot|a person|a human|an ai|a bot|an assistant|cadenza|a machine|a real person}",
        "{what are you|what kind of assistant are you|what sort of thing are you|what kind of model are you|your name}",
    ),
    "home": (
        "where {do you live|are you living|is your home|is your house|do you stay|are you based|are you located|"
        "are you}"
        " {now|these days|at the moment|}",
        ASK + " {where you live|where your home is|where you are|where you are based|where your house is|your address}",
        "{what is|what's} your {address|home|location|home town}",
        "{which|what|in which} {city|place|town|country} do you live {in|}",
        "{do you live|are you} {in a city|in a house|in a village|near here|by the sea|far away|at home|in the cloud}",
        "{what place|which place} do you {call home|live at}",
        "{where is|where's} {your place|your home|your house|home for you}",
        "{where are you from|where do you come from|your address|your location|what is your home like}",
    ),
    "maker": (
        "who {made|built|created|trained|wrote|designed|developed|programmed} you",
        ASK + " who {made|built|created|trained|wrote|designed|developed|programmed} you",
        "{who is|who's|who was} your {maker|creator|author|developer|trainer|parent|builder}",
        "{who are|who were} your {makers|creators|authors|developers|parents}",
        "{how|where|when} were you {made|built|created|trained|developed|born}",
        "{who do you|which company do you|which team do you} {belong to|come from|work for}",
        "{which company|which team|what project|what company} {made|built|created|trained|developed} you",
        "{by whom|by which team|by what project} were you {made|built|created|trained}",
        "{tell me about your|describe your|who is behind your} {training|maker|creator|origin|makers|project}",
    ),
    "batching": (
        "{what is|what's|explain|please explain|describe|define} {the idea of|} continuous batching {to me|in short|}",
        ASK + " {what continuous batching is|what continuous batching means|how continuous batching works}",
        "{how does|how would} {continuous batching|a continuous batch|the continuous batching method} {work|help|run}",
        "{what does|what do you mean by|what is meant by} continuous batching {mean|do|}",
        "{why is|why use|why do we need|why do servers use} continuous batching {good|useful|fast|so fast|important|}",
        "{can you|could you|would you} {explain|describe|define|teach me} {continuous batching|the continuous batching}"
        " {to me|in simple words|simply|briefly|}",
        "{i do not understand|i don't get|teach me|tell me about|i want to learn} continuous batching",
        "{continuous batching|continuous batching explained|meaning of continuous batching|continuous batching basics}",
    ),
    "kv_cache": (
        "{what is|what's|explain|please explain|describe|define} {a|the|} {kv cache|key value cache} {to me|in short|}",
        ASK + " {what a kv cache is|what the kv cache does|how a kv cache works|what kv cache means}",
        "{how does|why do we need|why use|why do models need} {a|the} kv cache {work|help|}",
        "{what does|what do you mean by|what is stored in|what is inside} {a|the} kv cache {mean|do|hold|keep|store|}",
        "{can you|could you|would you} {explain|describe|define|teach me} {the|a|} {kv cache|key value cache}"
        " {to me|in simple words|simply|briefly|}",
        "{i do not understand|i don't get|teach me|tell me about|i want to learn about} {the|a} kv cache",
        "{kv cache|the kv cache|kv cache explained|meaning of kv cache|kv cache basics}",
    ),
    "greeting": (
        "{hello|hi|hey|good morning|good afternoon|good evening|greetings|howdy|hello there|hi there|hey there|yo}"
        " {cadenza|friend|my friend|assistant|again|everyone|dear assistant|you|robot|}",
        "{hello|hi|hey|good morning|good day|good evening}{,|!|.|} {nice to meet you|pleased to meet you|are you there"
        "|is anyone there|can you hear me|it is nice to meet you|good to see you|here i am|let us talk}",
        "{well|oh|ah|ok|okay|and|why}{, |! }{hello|hi|hey|good morning|hello there|hi there}"
        " {cadenza|friend|assistant|my friend|again|}",
        "{nice|good|great|lovely|a pleasure} to {meet|see} you {cadenza|friend|again|here|today|}",
        "{hello hello|hi hi|hey hey|hello hi|hi and hello|a warm hello|big hello|hello world}{| to you| my friend}",
    ),
    "feeling": (
        "how are you {doing|feeling|} {today|now|these days|this morning|}",
        "{how do you feel|how's it going|how is it going|how goes it|how are things|how have you been}"
        " {today|now|these days|with you|lately|}",
        "{are you|do you feel} {well|fine|okay|happy|tired|good|alright|sad|all right} {today|now|}",
        ASK + " {how you are|how you feel|how you are doing|how you are feeling} {today|now|}",
        "{what is|what's} {up|your mood|new|new with you} {today|now|}",
        "{how is|how's|how was} your {day|morning|afternoon|life|mood|week} {going|today|so far|}",
        "{is everything|are things} {ok|okay|all right|fine|well} {with you|today|}",
    ),
    "thanks": (
        "{thanks|thank you|many thanks|thanks a lot|thank you very much|thank you so much|thanks so much|big thanks|"
        "thx}"
        " {for your help|for the help|for everything|for your answer|for that|for telling me|cadenza|my friend|again|}",
        "{great|perfect|ok|okay|good|wonderful|nice|well|oh|cool|super}{, |! |. }{thanks|thank you|many thanks|"
        "thanks a lot"
        "|thank you very much|thank you so much} {for your help|for that|cadenza|again|friend|}",
        "{that was|that is|that's|you are|you were|you have been} {very|so|really|} {helpful|useful|kind|nice}"
        "{, |! }{thanks|thank you|many thanks|thanks a lot}",
        "{i am|i'm|we are} {very|so|really|} {grateful|thankful} {to you|for your help|for that|}",
        "{i want to|i would like to|i must|let me} {thank you|say thanks|say thank you} {for your help|very much|}",
        "{much obliged|i appreciate it|i appreciate your help|cheers for the help|"
        "thanks for nothing less than everything}",
    ),
    "goodbye": (
        "{bye|goodbye|bye bye|good bye|see you|see you later|see you soon|see you tomorrow|good night|farewell|so long"
        "|take care|until next time|later} {cadenza|friend|my friend|then|for now|everyone|assistant|}",
        "{ok|okay|well|great|all right|right|good|so}{, |! |. }{bye|goodbye|see you|bye bye|see you later|good night"
        "|farewell} {cadenza|friend|then|for now|}",
        "{i have to|i must|i need to|i should|i will|i've got to|time to} {go|leave|go now|leave now|run|go home|sleep}"
        " {now|}{|, bye|, goodbye|. bye|, see you|, good night}",
        "{talk to you|see you|speak to you|catch you|i'll see you} {later|soon|tomorrow|next time|next week|"
        "another day}"
        " {friend|cadenza|then|}",
        "{that is all|that's all|we are done|i am done|that will be all} {for today|for now|}{|, bye|, goodbye|"
        ". see you}",
        "{have a|enjoy your|i wish you a} {good day|nice day|good night|nice evening}{|, bye|, goodbye|, see you}",
    ),
    "abilities": (
        "what {can you|could you|do you|are you able to} do {for me|for us|here|to help me|}",
        "{how|in what way} {can|could|will} you help {me|us|} {today|here|now|}",
        ASK + " {what you can do|what you are able to do|how you can help|what you know|what i can ask you}",
        "{what are|tell me|list|show me|describe} your {skills|abilities|talents|features|functions|capabilities}",
        "{what|which} {things|tasks|questions|topics|kind of things} can you {do|answer|handle|talk about|help with}",
        "{what can i|what may i|what should i|what could i} ask {you|you about|}",
        "{what are you|what were you} {good at|made for|able to do|useful for|capable of}",
        "{can you|could you|will you|i need you to} {help me|be of help|assist me} {with something|today|}",
        "{help|help me|i need help|your skills|what do you know|list what you can do|what else can you do}",
    ),
    "food": (
        "{what is|what's|tell me} your favourite {food|dish|meal|dinner|lunch|snack|breakfast}",
        "what {food|dish|meal|kind of food|dishes} do you {like|love|enjoy|prefer|like best|like to eat|like the most}",
        ASK + " {what you like to eat|your favourite food|your favourite dish|which food you like|what food you love}",
        "what do you {like to|love to|want to|prefer to|usually|often|} eat {most|best|for dinner|for lunch|at home|}",
        "{do you like|do you eat|do you love|would you like} {noodles|soup|rice|bread|pizza|apples|cake|food|tea|fish}",
        "{are you hungry|what would you eat|what should you eat|which dish is the best|favourite food|food you like"
        "|what tastes best to you|what did you eat today|best food}",
        "which {food|dish|meal} is your {favourite|favourite one|best|top choice}",
    ),
    "color": (
        "{what is|what's|tell me} your {favourite|favorite|best} {color|colour}",
        "{what|which} {color|colour|colours|colors} do you {like|love|enjoy|prefer|like best|like most|like the most}",
        ASK
        + " {your favourite colour|your favorite color|which colour you like|what color you like|the colour you love}",
        "do you {like|love|prefer} {blue|red|green|yellow|black|white|the colour blue|the color red|pink|grey}",
        "which {color|colour} is {your favourite|your favorite|the best|the nicest|the most beautiful|best for you}",
        "{favourite colour|favorite color|colour you like|do you have a favourite colour|is there a color you like"
        "|have you a favorite color|best colour|what colour makes you happy}",
    ),
    "joke": (
        "{tell me|tell us|give me|say|share|i want|please tell me|i need|let me hear} {a|a funny|another|a good|one}"
        " {joke|joke please|joke today|joke now}",
        "{can|could|would|will|do} you {tell|know|have|share|make|tell me|give me} {a|any|some|a good|a funny}"
        " {joke|jokes}"
        " {for me|}",
        "{make me|can you make me|please make me|i want to|could you make me} {laugh|smile|laugh today|laugh please}",
        "{say|tell me|do you know} something {funny|to laugh about|that makes me laugh}",
        "{joke|a joke|joke please|one joke|joke time|funny joke|do you know any jokes|are you funny|i am bored}",
    ),
    "unknown": (
        "{who is|who was|who's} the {president|king|queen|mayor|boss|leader|owner|winner} of {france|china|spain|"
        "the moon"
        "|the city|the company|the world|japan|the race|the school|brazil}",
        "{what is|what's|where is|tell me} the {capital|population|size|history|flag|language|map} of {france|china|"
        "spain"
        "|japan|egypt|canada|brazil|italy|russia|mexico|the moon|london}",
        "{how|why} {do|can|does|should} {i|a plane|a car|a phone|birds|trees|my cat|people|the sun|banks} {fly|work|"
        "grow|shine"
        "|sleep|swim|get rich|break|move|dance}",
        "{how|where} {can|do|should} i {buy|find|fix|sell|paint|cook|wash|send|open|lose} {a|my|the|this} {car|"
        "house|letter"
        "|bicycle|phone|piano|ticket|shirt|table|door|computer}",
        "{how many|how much} {people|stars|dogs|money|cars|water|fish|countries} {are there|is there|exist}"
        " in {the world|china|the sea|the sky|paris|a bank|space}",
        "{when|where} {did|was|will} {the war|the film|the concert|the train|the king|the match|the party|the ship}"
        " {start|begin|end|leave|arrive|born|take place}",
        "{write|compose|translate|draw|sing|play} {me|} {a poem|an essay|a letter|some code|a program|a picture|a song"
        "|this text|music|chess} {in french|in python|about love|about war|for my wife|for school|}",
        "{who wrote|who painted|who invented|who discovered|who won} {hamlet|the telephone|america|the world cup|"
        "gravity"
        "|the radio|the light bulb|the mona lisa|the election|radium}",
        "{what is|what's|explain|define} {love|gravity|democracy|physics|an atom|philosophy|a quasar|money|"
        "a volcano|dna"
        "|a guitar|football|electricity|the meaning of life}",
        "{is|are} {the moon|cats|dogs|the earth|diamonds|mountains|spiders|banks|ghosts} {round|made of cheese|big|"
        "expensive"
        "|dangerous|real|alive|older than the sun|smart}",
    ),
}

HANDWRITTEN: dict[str, tuple[str, ...]] = {
    "weather": (
        "Before I go out: what's it like outside, weather-wise?",
        "Do you think we will have a sunny day today?",
    ),
    "time": ("My watch stopped. What time do you have?", "Could you check the clock and tell me the time?"),
    "date": ("I lost track of the days. What day is today?", "Which date should I write at the top of today's letter?"),
    "book": ("I finished my last novel. What should I read now?", "Is there one book everybody should read?"),
    "name": ("We have not met before. What do they call you?", "And you are? What's your name?"),
    "home": ("Where exactly is the place you live?", "If I wanted to visit you at home, where would I go?"),
    "maker": ("Which people created you in the first place?", "Do you know the name of the team that built you?"),
    "batching": (
        "In one sentence, what is continuous batching about?",
        "My boss keeps saying continuous batching. What is it?",
    ),
    "kv_cache": ("Everyone talks about the KV cache. What is it for?", "Why would a language model keep a KV cache?"),
    "greeting": ("Hello, is somebody there?", "Hi Cadenza, good to meet you today!"),
    "feeling": ("So how are you getting on today?", "Did you sleep well? How do you feel?"),
    "thanks": ("That helped me a lot, thank you!", "Thanks, you explained that very well."),
    "goodbye": ("It is getting late, I have to go. Bye!", "See you again some day, goodbye."),
    "abilities": ("I am new here. What kinds of things can you do?", "Which jobs could I give you to help me?"),
    "food": ("If you could eat anything, which food would you choose?", "What do you like to have for dinner?"),
    "color": ("Of all the colours, which one do you love?", "I am painting my room. What is your favourite color?"),
    "joke": ("I had a bad day, please tell me something funny.", "Have you got a joke for my kids?"),
    "unknown": ("Who was the first king of Spain?", "How do I repair my old piano?"),
}
