------------------------------ MODULE $module ------------------------------
\* The composed system of schedule `$schedule`: who may hold what, and when.
\*
\* The tables and the two guard operators come from states/. All else is written by hand, not
\* generated from the runtime's step function, so that the two can be compared. Check it with TLC and the
\* .cfg beside it.
\*
\* An epoch counts by equality only: 0 none, 1 an old one, 2 the link's own. A version is a lineage
\* (0 none, 1 an old one, 2 the newest) and a number, counted back from the newest.

EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    $workers,
    Fine,   \* FALSE: one worker's own move runs to its end at once
    Jobs    \* how many jobs a worker may have before it is given no other one

(*------------------------------------ The tables ------------------------------------*)

$tables

(*------------------------------------- The world -------------------------------------*)

VARIABLES
    world,  \* workers, links, lineage
    late    \* effects that were under way when their worker began to fall: they report late

vars == <<world, late>>

None == "none"
NoVersion == [lineage |-> 0, number |-> 0]
Oldest == -2

Set(seq) == {seq[i] : i \in DOMAIN seq}
Least(X) == CHOOSE x \in X : \A y \in X : x <= y
Most(X) == CHOOSE x \in X : \A y \in X : x >= y

RECURSIVE Sum(_, _)
Sum(f, X) == IF X = {} THEN 0 ELSE LET x == CHOOSE x \in X : TRUE IN f[x] + Sum(f, X \ {x})

HoldsOf(n, state) == Set(Holds[Role[n]][state])
Edges(n, trigger, state) ==
    {e \in Transitions[Role[n]] : e.trigger = trigger /\ e.from = state}
ActionsOf(n) == DOMAIN Actions[Role[n]]
IsHub(n) == \E l \in Links : Hub[l] = Role[n]
Receives(n) == {l \in Links : Spokes[l] = Role[n]}

Devices(n) ==
    CASE Placement[Role[n]] = "own" -> {n}
      [] Placement[Role[n]] = "all" -> {m \in Workers : Placement[Role[m]] = "own"}
      [] OTHER -> {Placement[Role[n]]}
Tenants(device) == {n \in Workers : device \in Devices(n)}

Nobody == [
    state |-> "disconnected", held |-> {}, move |-> None, dest |-> None,
    epochs |-> [l \in Links |-> 0], version |-> NoVersion,
    jobs |-> [a \in ActionNames |-> 0], live |-> TRUE, ghost |-> {}]

Init ==
    /\ world = [workers |-> [n \in Workers |-> Nobody],
                links |-> [l \in Links |-> [state |-> "down", epoch |-> 0, members |-> {}]],
                lineage |-> 0]
    /\ late = {}

Part(S, n) == S.workers[n]
Working(S, n) == Sum(Part(S, n).jobs, ActionNames)
Undead(S, n) == Part(S, n).move = None /\ Part(S, n).ghost # {}
\* The live ends of a link are all whose machine holds it somewhere.
Ends(S, l) == {n \in Workers :
    Part(S, n).live /\ \E s \in Set(States[Role[n]]) : l \in HoldsOf(n, s)}

\* A lease is good while its epoch is the link's and the link is up.
Lease(S, n, l) ==
    LET epoch == Part(S, n).epochs[l]
    IN epoch # 0 /\ epoch = S.links[l].epoch /\ S.links[l].state = "up"

\* The ledger: a worker claims the larger end of its move, and all that may still arrive.
Claimed(S, n, dest) ==
    LET w == Part(S, n)
        bound == IF dest = None THEN {} ELSE HoldsOf(n, dest)
    IN Most({Sum(Size, w.held), Sum(Size, bound)}) + Sum(Size, w.ghost)
Tokens(S, n, dest) ==
    LET w == Part(S, n)
        bound == IF dest = None THEN {} ELSE HoldsOf(n, dest)
    IN Cardinality((w.held \union w.ghost \union bound) \intersect Exclusive)
Fits(S, n, dest) ==
    LET Goes(m) == IF m = n THEN dest ELSE Part(S, m).dest
        bytes == [m \in Workers |-> Claimed(S, m, Goes(m))]
        tokens == [m \in Workers |-> Tokens(S, m, Goes(m))]
    IN \A device \in Devices(n) :
        /\ Sum(bytes, Tenants(device)) <= Capacity
        /\ Sum(tokens, Tenants(device)) <= 1

(*------------------------------------- The guards -------------------------------------*)

\* What a guard reads is a set: of one value, or empty where there is none.
Peers(S, role) == {n \in Workers : Role[n] = role /\ Part(S, n).live}
Read_state(S, n) == {IF Part(S, n).move # None THEN "moving" ELSE Part(S, n).state}
Read_version(S, n) ==
    IF Part(S, n).version = NoVersion THEN {} ELSE {Part(S, n).version.number}
Read_lineage(S, n) ==
    IF Part(S, n).version = NoVersion THEN {} ELSE {Part(S, n).version.lineage}
Read_epoch(S, n) == LET all == {Part(S, n).epochs[l] : l \in Links} \ {0}
                    IN IF all = {} THEN {} ELSE {Most(all)}
Read_lease(S, n) == {\E l \in Links : Lease(S, n, l)}
Read_in_flight(S, n) == {Working(S, n)}
Read_live(S, n) == {Part(S, n).live}
Read_undead(S, n) == {Undead(S, n)}

\* Nothing equals nothing, and it has no order.
Equal(a, b) == a # {} /\ b # {} /\ a = b
Less(a, b) == \E x \in a, y \in b : x < y
AtMost(a, b) == \E x \in a, y \in b : x <= y

MayMove(S, self, trigger, from, dest) ==
$transition_guards

MayDo(S, self, action, dest) ==
$action_guards

(*------------------------------ A transition and its effects ------------------------------*)

\* The links whose ends a worker moves with: one, or none.
Joint(S, n) ==
    {e.joint : e \in Edges(n, Part(S, n).move, Part(S, n).state)} \ {None}
Movers(S, l) == {n \in Workers : l \in Joint(S, n)}

\* On the way back from a transition that it won't complete.
Falling(S, n) ==
    LET w == Part(S, n)
    IN w.move # None /\ \A e \in Edges(n, w.move, w.state) : e.to # w.dest

\* What stands last in the states that hold it goes first; ties go by name.
Rank(n, r) ==
    LET orders == {Holds[Role[n]][s] : s \in Set(States[Role[n]])}
    IN Most({i \in 1..Len(Resources) : \E o \in orders : i \in DOMAIN o /\ o[i] = r})
Outermost(n, held) ==
    LET far == {r \in held : \A q \in held : Rank(n, q) <= Rank(n, r)}
    IN Resources[Least({i \in DOMAIN Resources : Resources[i] \in far})]

Effect(n, op, r, epoch) == [worker |-> n, op |-> op, resource |-> r, epoch |-> epoch]

\* What a moving worker has to do next: releases, outermost first; then acquisitions, in order.
Todo(S, n) ==
    LET w == Part(S, n)
        order == Holds[Role[n]][w.dest]
        surplus == w.held \ Set(order)
        missing == {i \in DOMAIN order : order[i] \notin w.held}
        out == Outermost(n, surplus)
        in == order[Least(missing)]
    IN IF w.dest = None THEN {}
       ELSE IF surplus # {}
       THEN {Effect(n, "release", out, IF out \in Links THEN w.epochs[out] ELSE 0)}
       ELSE IF missing # {}
       THEN {Effect(n, "acquire", in, IF in \in Links THEN S.links[in].epoch ELSE 0)}
       ELSE {}

\* The barrier: no end of a joint transition acquires before all have released, and none joins
\* the link before all have acquired what comes before it.
Passed(S, l, r) ==
    \A n \in Movers(S, l) : \A e \in Todo(S, n) :
        e.op = "acquire" /\ (r = l => e.resource = l)
Due(S, n) ==
    {e \in Todo(S, n) : e.op = "release" \/ \A l \in Joint(S, n) : Passed(S, l, e.resource)}
AllDue(S) == UNION {Due(S, n) : n \in Workers}

\* What a worker may acquire now it may hold before it tells.
Arriving(S, n) ==
    IF ~Falling(S, n) /\ \E e \in Due(S, n) : e.op = "acquire" THEN HoldsOf(n, Part(S, n).dest) ELSE {}

\* A trigger that has no row leaves a link as it is.
Moves(S, l, trigger) == {m \in LinkMoves : m[1] = S.links[l].state /\ m[2] = trigger}
LinkMoved(S, l, trigger) ==
    LET moves == Moves(S, l, trigger)
    IN IF moves = {} THEN S
       ELSE [S EXCEPT !.links[l].state = (CHOOSE m \in moves : TRUE)[3]]

\* A link is closed when the last end has left.
Closed(S, l) ==
    IF S.links[l].state = "opening" \/ \E n \in Workers : Part(S, n).epochs[l] # 0 THEN S
    ELSE [LinkMoved(S, l, "close") EXCEPT !.links[l].members = {}]

\* The largest state that is true of what is kept.
Largest(n, keep) ==
    LET states == States[Role[n]]
        fitting == {i \in DOMAIN states : HoldsOf(n, states[i]) \subseteq keep}
        size(i) == Len(Holds[Role[n]][states[i]])
    IN states[Least({i \in fitting : \A j \in fitting : size(j) <= size(i)})]

\* Workers turn back: they keep what their committed state and they hold, less a bad link. What
\* each could acquire in the world before may arrive all the same.
Fallen(S, n, before) ==
    LET w == Part(S, n)
        bad == {l \in Links : ~Lease(S, n, l)}
        keep == (w.held \intersect HoldsOf(n, w.state)) \ bad
    IN [w EXCEPT !.dest = Largest(n, keep), !.ghost = @ \union Arriving(before, n)]
Fall(S, X, before) ==
    [S EXCEPT !.workers =
        [n \in Workers |-> IF n \in X THEN Fallen(S, n, before) ELSE Part(S, n)]]

\* A report is taken of what is due, or of what was under way when the worker began to fall.
Taken(S, e) ==
    LET w == Part(S, e.worker)
    IN \/ e \in Due(S, e.worker)
       \/ /\ Falling(S, e.worker)
          /\ e.resource \in (IF e.op = "release" THEN w.held ELSE w.ghost \ w.held)

Done(S, e) ==
    LET n == e.worker
        r == e.resource
        got == e.op = "acquire"
        torn == \E l \in Receives(n) : Carries[l] = r
        told == [S EXCEPT
            !.workers[n].held = IF got THEN @ \union {r} ELSE @ \ {r},
            !.workers[n].epochs =
                [l \in Links |-> IF l # r THEN @[l] ELSE IF got THEN e.epoch ELSE 0],
            !.workers[n].version = IF torn THEN NoVersion ELSE @]
        left == IF r \in Links THEN Closed(told, r) ELSE told
    IN IF Falling(S, n) THEN Fall(left, {n}, left) ELSE left

CanUndo(S, n) == Part(S, n).move # None
Undo(S, n) ==
    IF Joint(S, n) = {} THEN Fall(S, {n}, S)
    ELSE LET l == CHOOSE l \in Joint(S, n) : TRUE
             together == IF Part(S, n).move = "connect" THEN Movers(S, l) ELSE {n}
         IN Closed(Fall(LinkMoved(S, l, "break"), together, S), l)

\* A death breaks the links that the dead was in; who waits in a transition with it falls.
RECURSIVE Broken(_, _, _, _)
Broken(S, X, n, before) ==
    IF X = {} THEN S
    ELSE LET l == CHOOSE l \in X : TRUE
             broken == Fall(LinkMoved(S, l, "break"), Movers(before, l) \ {n}, before)
             touched == n \in S.links[l].members \union Movers(before, l)
         IN Broken(IF touched THEN Closed(broken, l) ELSE S, X \ {l}, n, before)

CanDie(S, n) ==
    Part(S, n).live /\ (Part(S, n).state # "disconnected" \/ Part(S, n).move # None)
Died(S, n, lost) ==
    LET w == Part(S, n)
        ghost == w.held \union w.ghost \union Arriving(S, n)
        gone == [S EXCEPT !.workers[n] = [Nobody EXCEPT !.live = ~lost, !.ghost = ghost]]
    IN Broken(gone, Links, n, S)

\* After a release that failed nobody knows what the process holds: it must end.
Failed(S, e) ==
    IF e.op = "release" THEN Died(S, e.worker, FALSE)
    ELSE IF Falling(S, e.worker) THEN S
    ELSE Undo(S, e.worker)

(*---------------------------------- Begin and commit ----------------------------------*)

CanBegin(S, n, e) ==
    /\ Part(S, n).live /\ Part(S, n).move = None /\ Part(S, n).state = e.from
    /\ MayMove(S, n, e.trigger, e.from, e.to)
Bound(S, n, e) ==
    [Part(S, n) EXCEPT !.move = e.trigger, !.dest = e.to,
                       !.version = IF e.trigger = "start" THEN NoVersion ELSE @]
Begun(S, n, e) == [S EXCEPT !.workers[n] = Bound(S, n, e)]

\* Every live end opens a link; whoever still holds it closes it.
JointEnds(S, l, trigger) ==
    {n \in Ends(S, l) : trigger = "disconnect" => Part(S, n).epochs[l] # 0}
EdgeOf(S, n, trigger) == CHOOSE e \in Edges(n, trigger, Part(S, n).state) : TRUE
CanBeginTogether(S, l, trigger) ==
    LET ends == JointEnds(S, l, trigger)
    IN /\ ends # {}
       /\ \A n \in ends : \E e \in Edges(n, trigger, Part(S, n).state) :
            e.joint = l /\ CanBegin(S, n, e)
       /\ trigger = "connect" => Moves(S, l, "open") # {}
\* What was the link's own epoch is an old one from now on.
Opened(S, l) ==
    LET old == [S EXCEPT !.workers = [n \in Workers |->
            [Part(S, n) EXCEPT !.epochs[l] = IF @ = 2 THEN 1 ELSE @]]]
        moved == LinkMoved(old, l, "open")
    IN [moved EXCEPT !.links[l].epoch = 2, !.links[l].members = Ends(S, l)]
BegunTogether(S, l, trigger) ==
    LET ends == JointEnds(S, l, trigger)
        open == IF trigger = "connect" THEN Opened(S, l) ELSE S
    IN [open EXCEPT !.workers = [n \in Workers |->
        IF n \in ends THEN Bound(open, n, EdgeOf(S, n, trigger)) ELSE Part(open, n)]]

Opens(S, n) ==
    IF Part(S, n).dest = "connected" /\ Part(S, n).state # "connected" THEN Joint(S, n) ELSE {}
CanCommit(S, X) ==
    /\ X # {}
    /\ \A n \in X : Part(S, n).dest # None /\ Todo(S, n) = {}
    /\ \A n \in X : \A l \in Opens(S, n) : X = Movers(S, l)
\* Nothing arrives any more of what a worker fell from.
Settled(S, n) ==
    LET w == Part(S, n)
    IN [w EXCEPT !.state = w.dest, !.move = None, !.dest = None,
                 !.version = IF w.dest = "disconnected" THEN NoVersion ELSE @,
                 !.ghost = IF Falling(S, n) THEN {} ELSE @]
\* A hub that has started begins a lineage; all others are old.
NewLineage(S, n) ==
    [S EXCEPT !.lineage = 2, !.workers = [m \in Workers |-> [Part(S, m) EXCEPT !.version =
        IF m = n THEN [lineage |-> 2, number |-> 0]
        ELSE IF @ = NoVersion THEN @ ELSE [lineage |-> 1, number |-> 0]]]]
Commit(S, X) ==
    LET opened == UNION {Opens(S, n) : n \in X}
        begins == {n \in X : IsHub(n) /\ Part(S, n).move = "start"
                             /\ Part(S, n).dest # "disconnected"}
        done == [S EXCEPT
            !.workers = [n \in Workers |-> IF n \in X THEN Settled(S, n) ELSE Part(S, n)],
            !.links = [l \in Links |->
                IF l \in opened THEN LinkMoved(S, l, "opened").links[l] ELSE S.links[l]]]
    IN IF begins = {} THEN done ELSE NewLineage(done, CHOOSE n \in begins : TRUE)

\* One worker's own move, from its begin to its commit.
RECURSIVE Through(_, _)
Through(S, n) ==
    IF Due(S, n) = {} THEN S ELSE Through(Done(S, CHOOSE e \in Due(S, n) : TRUE), n)
CanRun(S, n, e) ==
    CanBegin(S, n, e) /\ (Fine \/ CanCommit(Through(Begun(S, n, e), n), {n}))
Run(S, n, e) ==
    IF Fine \/ e.trigger \in {"connect", "disconnect"} THEN Begun(S, n, e)
    ELSE Commit(Through(Begun(S, n, e), n), {n})

(*-------------------------------------- Work --------------------------------------*)

CanDo(S, n, a) ==
    /\ Part(S, n).live /\ Part(S, n).move = None /\ a \in ActionsOf(n)
    /\ Actions[Role[n]][a].needs \subseteq Part(S, n).held
    /\ MayDo(S, n, a, None)
CanAct(S, n, a) == Working(S, n) < Jobs /\ CanDo(S, n, a)
Act(S, n, a) == [S EXCEPT !.workers[n].jobs[a] = @ + 1]

\* All ends that have the action do it together; who receives is torn until the push is complete.
Doers(S, l, a) == {n \in Ends(S, l) : a \in ActionsOf(n)}
CanPush(S, l, a) == Doers(S, l, a) # {} /\ \A n \in Doers(S, l, a) : CanDo(S, n, a)
Push(S, l, a) ==
    [S EXCEPT !.workers = [n \in Workers |->
        IF n \notin Doers(S, l, a) THEN Part(S, n)
        ELSE [Part(S, n) EXCEPT !.jobs[a] = @ + 1,
                                !.version = IF l \in Receives(n) THEN NoVersion ELSE @]]]

Updates(n, a) == Actions[Role[n]][a].updates
Updated(version) == [version EXCEPT !.number = @ + 1]
CanEnd(S, n, a) == Part(S, n).jobs[a] > 0
Ended(S, n, a, ok) ==
    LET w == Part(S, n)
        newer == ok /\ Updates(n, a) /\ w.version # NoVersion
    IN [S EXCEPT !.workers[n].jobs[a] = @ - 1,
                 !.workers[n].version = IF newer THEN Updated(@) ELSE @]

\* A collective may return normally after an abort: it counts if every lease is still good.
Pushing(S, l, a) == {n \in Ends(S, l) : CanEnd(S, n, a)}
Pushed(S, l, a, ok) ==
    LET names == Pushing(S, l, a)
        complete == ok /\ \A n \in names : Lease(S, n, l)
        sent == {Part(S, n).version : n \in {m \in Workers : Role[m] = Hub[l]}}
        got == IF complete /\ sent # {} THEN CHOOSE v \in sent : TRUE ELSE NoVersion
        One(n) ==
            LET w == Part(S, n)
                newer == ok /\ Updates(n, a) /\ w.version # NoVersion
            IN [w EXCEPT !.jobs[a] = @ - 1,
                         !.version = IF l \in Receives(n) THEN got
                                     ELSE IF newer THEN Updated(@) ELSE @]
    IN [S EXCEPT !.workers =
        [n \in Workers |-> IF n \in names THEN One(n) ELSE Part(S, n)]]

(*--------------------------------- Loss and recovery ---------------------------------*)

CanSever(S, n, l) ==
    /\ Part(S, n).move = None /\ Working(S, n) = 0
    /\ Part(S, n).epochs[l] # 0 /\ ~Lease(S, n, l)
Severed(S, n) ==
    LET moved == [S EXCEPT !.workers[n].move = "sever"] IN Fall(moved, {n}, moved)
Confirmed(S, n) == [S EXCEPT !.workers[n].ghost = {}]
Joined(S, n) == [S EXCEPT !.workers[n].live = TRUE]

(*-------------------------------------- Steps --------------------------------------*)

Busy == {e.worker : e \in late}
Reports == late \union {e \in AllDue(world) : e.worker \notin Busy}
Groups ==
    {{n} : n \in {m \in Workers : CanUndo(world, m)} \ Busy}
    \union {X \in {Movers(world, l) : l \in Links} : X \intersect Busy = {}}
JointActions(l) ==
    {a \in ActionNames : \E n \in Workers : a \in ActionsOf(n) /\ Actions[Role[n]][a].joint = l}
OwnActions(n) == {a \in ActionsOf(n) : Actions[Role[n]][a].joint = None}
OwnEdges(n) == {e \in Transitions[Role[n]] : e.joint = None}

\* Versions are counted back from the newest.
Recounted(S) ==
    LET numbers == {Part(S, n).version.number :
            n \in {m \in Workers : Part(S, m).version.lineage = 2}}
        newest == IF numbers = {} THEN 0 ELSE Most(numbers)
    IN [S EXCEPT !.workers = [n \in Workers |-> [Part(S, n) EXCEPT !.version.number =
        IF Part(S, n).version.lineage = 2 THEN Most({@ - newest, Oldest}) ELSE 0]]]

\* What is left of the late effects when one has reported.
Left(S, reported) == {e \in late \ reported : Part(S, e.worker).move # None}

\* An event that makes nobody fall.
To(S) == world' = Recounted(S) /\ late' = Left(S, {})

\* An event that may: of what was under way in those who begin to fall, all, one or nothing
\* reports late.
FallTo(S, reported) ==
    LET under == {e \in AllDue(world) \ reported :
            ~Falling(world, e.worker) /\ Falling(S, e.worker)}
    IN /\ world' = Recounted(S)
       /\ \E more \in {{}, under} \union {{e} : e \in under} :
            late' = Left(S, reported) \union more

Report(e) == world' = Recounted(Done(world, e)) /\ late' = Left(Done(world, e), {e})
Fail(e) == FallTo(Failed(world, e), {e})
Aged(l) == {IF e.resource = l /\ e.epoch = 2 THEN [e EXCEPT !.epoch = 1] ELSE e : e \in late}
Together(l, trigger) ==
    /\ CanBeginTogether(world, l, trigger)
    /\ world' = Recounted(BegunTogether(world, l, trigger))
    /\ late' = IF trigger = "connect" THEN Aged(l) ELSE late

Next ==
    \/ \E e \in Reports : Taken(world, e) /\ (Report(e) \/ Fail(e))
    \/ \E X \in Groups : CanCommit(world, X) /\ To(Commit(world, X))
    \/ \E l \in Links : \E trigger \in {"connect", "disconnect"} : Together(l, trigger)
    \/ \E l \in Links : \E a \in JointActions(l) :
        \/ CanPush(world, l, a) /\ To(Push(world, l, a))
        \/ /\ Pushing(world, l, a) # {}
           /\ \E ok \in BOOLEAN : To(Pushed(world, l, a, ok))
    \/ \E n \in Workers :
        \/ \E e \in OwnEdges(n) : CanRun(world, n, e) /\ To(Run(world, n, e))
        \/ \E a \in OwnActions(n) :
            \/ CanAct(world, n, a) /\ To(Act(world, n, a))
            \/ CanEnd(world, n, a) /\ \E ok \in BOOLEAN : To(Ended(world, n, a, ok))
        \/ \E l \in Links : CanSever(world, n, l) /\ To(Severed(world, n))
        \/ CanUndo(world, n) /\ FallTo(Undo(world, n), {})
        \/ CanDie(world, n) /\ \E lost \in {FALSE, Role[n] = "rollout"} :
            FallTo(Died(world, n, lost), {})
        \/ Undead(world, n) /\ To(Confirmed(world, n))
        \/ ~Part(world, n).live /\ To(Joined(world, n))

Spec == Init /\ [][Next]_vars

(*------------------------------- What must always hold -------------------------------*)

Resting(n) == Part(world, n).move = None
Serves == {"generate", "evaluate"} \intersect ActionNames

\* 1: no worker that is sleeping or disconnected holds a communicator
NoCommunicatorAsleep ==
    \A n \in Workers :
        Resting(n) /\ Part(world, n).state \in {"sleeping", "disconnected"} =>
            /\ Part(world, n).held \intersect Communicators = {}
            /\ \A l \in Links : Part(world, n).epochs[l] = 0

\* 2: all ends of a link that is up hold the same epoch
OneEpoch ==
    \A n \in Workers, l \in Links :
        world.links[l].state = "up" => Part(world, n).epochs[l] \in {0, world.links[l].epoch}

\* What may be on a worker's devices: what it holds, its zombie, and what arrives late.
Present(n) ==
    Part(world, n).held
    \union (IF Undead(world, n) THEN Part(world, n).ghost ELSE {})
    \union {e.resource : e \in {e \in late : e.worker = n /\ e.op = "acquire"}}
AllDevices == UNION {Devices(n) : n \in Workers}

\* 3: at most one exclusive resource on a device
OneTenant ==
    LET tokens == [n \in Workers |-> Cardinality(Present(n) \intersect Exclusive)]
    IN \A device \in AllDevices : Sum(tokens, Tenants(device)) <= 1

\* 4: the bytes claimed on a device never exceed its capacity
WithinCapacity ==
    LET bytes == [n \in Workers |-> Sum(Size, Present(n))]
    IN \A device \in AllDevices : Sum(bytes, Tenants(device)) <= Capacity

\* 5: nobody serves weights without a version
NothingTornIsServed ==
    \A n \in Workers : (\E a \in Serves : CanEnd(world, n, a)) =>
        Part(world, n).version # NoVersion

\* 6: a push is complete or torn everywhere
PushIsWhole ==
    \A l \in Links : \A a \in JointActions(l) :
        LET names == Pushing(world, l, a)
            spokes == {n \in names : l \in Receives(n)}
            whole == \A n \in world.links[l].members :
                a \in ActionsOf(n) => CanEnd(world, n, a)
            Versions(ok) == {Part(Pushed(world, l, a, ok), n).version : n \in spokes}
        IN /\ \A n \in spokes : Part(world, n).version = NoVersion
           /\ \A ok \in BOOLEAN :
                /\ Cardinality(Versions(ok)) <= 1
                /\ (whole /\ ok) \/ Versions(ok) \subseteq {NoVersion}

\* 7: whoever works holds what the work needs
WorkHasWhatItNeeds ==
    \A n \in Workers : \A a \in ActionsOf(n) :
        CanEnd(world, n, a) => Actions[Role[n]][a].needs \subseteq Part(world, n).held

\* 8: a worker that is not moving holds exactly what its state says
HoldsWhatItsStateSays ==
    \A n \in Workers :
        /\ Resting(n) => Part(world, n).held = HoldsOf(n, Part(world, n).state)
        /\ \A l \in Links : l \in Part(world, n).held <=> Part(world, n).epochs[l] # 0

\* 9: nobody holds a link alone
NobodyHoldsALinkAlone ==
    \A n \in Workers, l \in Links : Resting(n) /\ Lease(world, n, l) =>
        \E m \in Workers \ {n} : Part(world, m).epochs[l] = Part(world, n).epochs[l]

\* Every report that is due can be told.
ReportsAreTaken == \A e \in Reports : Taken(world, e)

\* No deadlock: something goes on that is no fault.
SomethingGoesOn ==
    \/ Reports # {}
    \/ \E X \in Groups : CanCommit(world, X)
    \/ \E l \in Links :
        \/ \E trigger \in {"connect", "disconnect"} : CanBeginTogether(world, l, trigger)
        \/ \E a \in JointActions(l) : CanPush(world, l, a) \/ Pushing(world, l, a) # {}
    \/ \E n \in Workers :
        \/ \E e \in OwnEdges(n) : CanRun(world, n, e)
        \/ \E a \in OwnActions(n) : CanAct(world, n, a) \/ CanEnd(world, n, a)
        \/ \E l \in Links : CanSever(world, n, l)
        \/ Undead(world, n)

\* Rollout workers are alike.
Symmetry == Permutations({n \in Workers : Role[n] = "rollout"})
=============================================================================
