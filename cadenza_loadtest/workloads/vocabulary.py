"""The vocabulary of text prompts: common, short words in lower case."""

VOCABULARY = tuple(
    """
    about above across act add after again age air all almost alone along also always among and animal answer any
    appear are area arm art ask away baby back bad bank base bed been before began best better between big bird
    black blue board boat body book both box boy bring brother build but buy call came can car care carry case cat
    catch cause cent center change chance check child city class clean clear close cloud coast cold color come
    common cook cool corn could count country course cover cross cry cut dance dark day dead deal deep did does dog
    done door down draw dream dress drink drive drop dry during each ear early earth east eat edge egg eight end
    enough even ever every eye face fact fall family far farm fast father fear feel feet field fight fill final
    find fine fire first fish five floor flow fly follow food foot force form found four free fresh friend from
    front full fun game garden gave get girl give glass gold gone good got grass great green ground group grow had
    hair half hand happy hard has have head hear heart heat help her here high hill him his hold home hope horse
    hot hour house how ice idea inch iron island job join just keep key kind king knew know lake land large last
    late laugh law lay lead learn leave left less let letter level lie life light like line list little live long
    look lost lot love low machine made main make man many map mark may mean meet men metal mile milk mind minute
    miss money month moon more morning most mother mountain move much music must name near need never new next
    night nine north nose note now number ocean off often oil old once one only open order other our out over own
    page paint paper part party pass past path pay people phone piece place plain plan plane plant play point poor
    port post power press quick quiet race rain reach read ready real red rest rich ride right ring river road rock
    roll room round rule run safe said sail salt same sand saw say school sea seat second see seed seem sell send
    set seven shape she ship short should show side sign simple since sing sister sit six size skin sleep slow
    small snow soft soil some song soon sound south space speak spring stand star start state stay step stone stood
    stop store story street strong study such sugar summer sun sure table tail take talk tall teach tell ten test
    than that the their them then there these they thing think this those three time tiny tire told too took top
    town trade train travel tree trip true try turn two under until use very voice wait walk wall want war warm was
    watch water wave way wear week well went were west what wheel when where which while white who whole why wide
    wife wild will wind winter wish with woman wood word work world would write year yes you young your
    """.split()
)
